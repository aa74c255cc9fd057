"""The files of the retrieval recipe, its facts, and a small language model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mmattn.recipes import load_recipe


@pytest.fixture(scope="module")
def make_lm() -> ModuleType:
    """The script that made the shipped language model."""
    return load_recipe(Path("assets/rag"), "make_lm")


@pytest.fixture(scope="module")
def facts(recipe: SimpleNamespace) -> Any:
    """Facts to train on and held-out facts."""
    return recipe.data.load_facts()


@pytest.fixture(scope="module")
def lm(run_folder: Path) -> Path:
    """A folder with a random language model and a tokenizer that knows the words of some questions."""
    return run_folder / "lm"
