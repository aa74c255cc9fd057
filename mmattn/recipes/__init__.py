"""Recipes: where they are installed, how one is copied and loaded, how its settings are read, and how it is run.

Nothing here imports torch, so that the command line answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.recipes.folders import (
        Recipe,
        copy_recipe,
        find_recipe,
        list_recipes,
        load_recipe,
    )
    from mmattn.recipes.runner import read_settings, run_recipe, run_seeds

__all__ = [
    "Recipe",
    "copy_recipe",
    "find_recipe",
    "list_recipes",
    "load_recipe",
    "read_settings",
    "run_recipe",
    "run_seeds",
]

__getattr__, __dir__ = lazy_exports(__name__)
