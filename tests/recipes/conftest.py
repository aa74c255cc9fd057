"""Recipes as the command line loads them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from mmattn.recipes import find_recipe, load_recipe


@pytest.fixture(scope="module")
def load_files() -> Iterator[Callable[..., SimpleNamespace]]:
    """A function from a recipe's name and those of its files to these files; the search path is put back."""
    before = list(sys.path)

    def load(recipe: str, *names: str) -> SimpleNamespace:
        folder = find_recipe(recipe).folder
        return SimpleNamespace(**{name: load_recipe(folder, name) for name in names})

    yield load
    sys.path[:] = before
