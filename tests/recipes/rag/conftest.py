"""The files of the retrieval recipe, its facts, and a small language model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mmattn.recipes import load_recipe
from tests.recipes.rag.small import TOPICS


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    names = ("settings", "data", "documents", "continuing", "answering", "measure", "train", "train_docs", "reading")
    return load_files("rag", *names, "large")


@pytest.fixture(scope="module")
def make_lm() -> ModuleType:
    """The script that made the shipped language model."""
    return load_recipe(Path("assets/rag"), "make_lm")


@pytest.fixture(scope="module")
def facts(recipe: SimpleNamespace) -> Any:
    """Facts to train on and held-out facts."""
    return recipe.data.load_facts()


@pytest.fixture(scope="module")
def lm(make_lm: ModuleType, facts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random language model and a tokenizer that knows the words of some questions."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("lm")
    texts = list(make_lm.questions(facts[0], 50, Random(0)))
    tokenizer = make_lm.train_tokenizer([*texts, *TOPICS.values()], 500)
    make_lm.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
