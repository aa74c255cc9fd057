"""Recipes as the command line loads them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from mmattn.recipes import find_recipe, load_recipe


@pytest.fixture(scope="module")
def load_files() -> Callable[..., SimpleNamespace]:
    """A function from a recipe's name and those of its files to these files."""

    def load(recipe: str, *names: str) -> SimpleNamespace:
        folder = find_recipe(recipe).folder
        return SimpleNamespace(**{name: load_recipe(folder, name) for name in names})

    return load
