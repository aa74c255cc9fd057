"""The retrieval recipe's part where attention searches every token of some documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmattn
from mmattn.pipelines import read_passages

DOCUMENTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21], [30, 31, 32, 33, 34], [40], [5, 6, 7, 50, 51, 52, 53]]


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    return load_files("rag", "answering", "train", "train_tokens")


@pytest.fixture(scope="module")
def lm(recipe: SimpleNamespace) -> Any:
    """The shipped language model."""
    return recipe.answering.load_lm("assets/rag")[0]


def test_texts_keep_to_their_document_and_batches_to_their_fold(recipe: SimpleNamespace) -> None:
    made = recipe.train_tokens.cut(DOCUMENTS, 4, 2)
    assert [text.ids for text in made] == [
        [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15], [20, 21], [30, 31, 32, 33], [5, 6, 7, 50], [51, 52, 53]
    ]  # fmt: skip
    assert [text.fold for text in made] == [0, 0, 0, 1, 0, 0, 0], "and one token alone says nothing"
    drawn = list(islice(recipe.train_tokens.batches_of(made, 3, seed=1), 40))
    assert {len(batch) for batch in drawn} == {3, 1} and all(len({text.fold for text in batch}) == 1 for batch in drawn)
    again = list(islice(recipe.train_tokens.batches_of(made, 3, seed=1), 40))
    assert drawn == again != list(islice(recipe.train_tokens.batches_of(made, 3, seed=2), 40))


def test_a_library_without_a_fold_has_none_of_its_documents(recipe: SimpleNamespace, lm: Any) -> None:
    """And each slot is what came before a token, and the token, with at least half a window to read before it."""
    library = recipe.train_tokens.Library(lm, DOCUMENTS, layer=3, size=6, folds=2)
    assert list(map(len, library.folds)) == [10 + 4 + 6, 1 + 0]
    said = torch.nn.functional.rms_norm(lm.get_input_embeddings().weight.float(), (160,))
    slots = library.slots()
    for place, token in ((0, 6), (9, 15), (10, 31), (19, 53), (20, 21)):
        torch.testing.assert_close(slots[place, 160:], said[token])
    (whole,) = read_passages(lm, [DOCUMENTS[0][3:9]], 3)
    torch.testing.assert_close(slots[5:8], whole[3:6], rtol=1e-4, atol=1e-5)
    for fold in (0, 1):
        index = library.index(without=fold)
        assert torch.equal(index.store.version.entries.vectors, library.folds[1 - fold])
    assert len(library.index()) == 21 and len(library.some(7, seed=0)) == 7
    other = library.exchanged(seed=0).store.version.entries.vectors
    assert torch.equal(other[:, :160], slots[:, :160]) and not torch.equal(other[:, 160:], slots[:, 160:])
    torch.testing.assert_close(other[:, 160:].sum(0), slots[:, 160:].sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_run_has_its_controls(recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = {str(number): f"The statement {number} repeats a suite. " * (number + 2) for number in range(7)}
    monkeypatch.setattr(recipe.train_tokens, "load_topics", lambda: (topics, {"held": "A statement repeats a suite."}))
    tokens = {"max_steps": 2, "batch_size": 2, "window": 12, "rank": 2, "per_query": 5, "random": 9}
    settings = {"part": "tokens", "out": str(tmp_path / "run"), "progress": False, "tokens": tokens}
    out = recipe.train.main(settings)
    rows = {row["name"]: row["bits"] for row in json.loads((out / "table.json").read_text())["rows"]}
    name = "every token"
    assert [*rows] == [
        "frozen LM", name, f"{name}, random ones instead", f"{name}, exchanged ones instead", f"{name}, no memory",
        "LoRA, text only",
    ]  # fmt: skip
    assert len(set(rows.values())) == 6 and all(0.5 < bits < 20 for bits in rows.values())
    assert "tokens to search" in (out / "table.md").read_text()
    host, tokenizer = recipe.answering.load_lm("assets/rag")
    model: Any = mmattn.load(mmattn.training.load_lora(host, out / "lora"), out / "adapter")
    ids = tokenizer("The statement", return_tensors="pt")["input_ids"]
    memory = mmattn.Index.load(out / "index").as_memory(5)
    assert model.generate(ids, memory=memory, max_new_tokens=3, pad_token_id=1).shape[1] == ids.shape[1] + 3
