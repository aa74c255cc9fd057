"""An index of many vectors per entry keeps what an index promises: changes, files, threads, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import Index, Memory
from mmattn.errors import ConfigError, IndexFileError, IndexMismatchError, NonFiniteError, ShapeError
from mmattn.retrieval import InMemoryStore, MultiVectorIndex
from tests.foreign.store import SqliteStore
from tests.retrieval.late_interaction import WIDTH, LetterStates, agree, asked, ragged
from tests.retrieval.searching import STORES, files


@pytest.mark.parametrize("store", STORES)
def test_saved_and_loaded_it_finds_the_same(store: str, tmp_path: Path) -> None:
    encoder = LetterStates()
    settings = {"lists": 1, "visited": 1, "bytes": 13} if store == "ivfpq" else STORES[store]
    texts = ["sun and moon", "a grey cat", "the moon", "cats"]
    index = MultiVectorIndex.build(texts, encoder=encoder, metadata=[{"n": 1}] * 4, store=store, **settings)
    index.delete([3])
    index.save(tmp_path / "index")
    queries, names = ["the moon", "cat"], files(tmp_path)
    for mapped in (False, True):
        again = MultiVectorIndex.load(tmp_path / "index", encoder=encoder, mapped=mapped)
        assert (again.ids, again.metric, again.dim) == (index.ids, "cosine", WIDTH)
        for count in (None, 2):
            one, two = (each.search(queries, 2, num_candidates=count) for each in (index, again))
            assert one.texts == two.texts and torch.equal(one.scores, two.scores)
            assert torch.equal(one.memory().tokens, two.memory().tokens)
    assert again.add(["a fourth"]) == (4,) and files(tmp_path) == names
    again.save(tmp_path / "index")
    with pytest.raises(IndexFileError, match="another writer has saved"):
        index.save(tmp_path / "index")
    with pytest.raises(IndexMismatchError, match="entries were encoded by"):
        MultiVectorIndex.load(tmp_path / "index", encoder=LetterStates(1))


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    vectors = torch.randn(3, WIDTH)
    Index.build(vectors).save(tmp_path / "plain")
    Index.build(vectors, tokens=Memory(torch.randn(3, 5, 7))).save(tmp_path / "other width")
    Index.build(vectors, metric="l2", tokens=Memory(torch.randn(3, 5, WIDTH))).save(tmp_path / "l2")
    for name, match in (
        ("plain", "entries of one vector of width 13.*None"),
        ("other width", r"width 13.*width 7"),
    ):
        with pytest.raises(IndexMismatchError, match=match):
            MultiVectorIndex.load(tmp_path / name)
    with pytest.raises(ConfigError, match="'l2'"):
        MultiVectorIndex.load(tmp_path / "l2")
    index = MultiVectorIndex.build(ragged(3))
    index.delete(index.ids)
    index.save(tmp_path / "empty")
    assert MultiVectorIndex.load(tmp_path / "empty").add(ragged(2)) == (3, 4)


@pytest.mark.parametrize(
    ("queries", "error", "match"),
    [
        (torch.randn(3, 7), IndexMismatchError, "width 7 and the index has width 13"),
        (torch.randn(2, 3, 7), IndexMismatchError, "width 7 and the index has width 13"),
        ([torch.randn(2, WIDTH), torch.randn(2, 7)], IndexMismatchError, "width 7 and the index has width 13"),
        (Memory(torch.randn(2, 3, 7)), IndexMismatchError, "width 7 and the index has width 13"),
        (Memory(torch.randn(1, 3, WIDTH), torch.zeros(1, 3, dtype=torch.bool)), ShapeError, "number 0 has no vector"),
        ([torch.randn(2, WIDTH), torch.empty(0, WIDTH)], ShapeError, "number 1 has no vector"),
        (torch.randn(WIDTH), ShapeError, r"number 0 is \(\)"),
        (torch.randn(2, 3, 5, WIDTH), ShapeError, r"number 0 is \(3, 5, 13\)"),
        ([torch.randn(2, WIDTH), torch.randn(WIDTH)], ShapeError, r"number 1 is \(13,\)"),
        (torch.ones(3, WIDTH, dtype=torch.bool), ShapeError, "real numbers"),
        ([torch.ones(2, WIDTH), torch.zeros(1, WIDTH)], ShapeError, "queries, number 1: row 0 is all zeros"),
        (torch.full((1, 2, WIDTH), torch.nan), NonFiniteError, "queries, number 0: row 0 has NaN"),
        (None, ShapeError, "NoneType"),
        (torch.tensor(3.0), ShapeError, "got Tensor"),
        (["a text"], ConfigError, "none: give encoder="),
    ],
)
def test_queries_that_are_refused(queries: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        MultiVectorIndex.build(ragged(3)).search(queries, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"items": [torch.ones(2, 7)], "encoder": LetterStates()}, IndexMismatchError, "width 7.*width 13"),
        ({"items": []}, ShapeError, r"torch.empty\(0, m, e\)"),
        ({"items": torch.ones(2, 3)}, ShapeError, r"number 0 is \(3,\). Entries of one vector are what Index holds"),
        ({"items": [torch.ones(2, 3), torch.empty(0, 3)]}, ShapeError, "number 1 has no vector"),
        ({"items": [torch.ones(2, 3), torch.zeros(1, 3)]}, ShapeError, "vectors, number 1: row 0 is all zeros"),
        ({"items": torch.ones(2, 3, 5), "metric": "l2"}, ConfigError, "'cosine', 'ip'; got 'l2'"),
        ({"items": torch.ones(2, 3, 5), "tokens": Memory(torch.ones(2, 3, 5))}, ConfigError, "leave it out"),
    ],
)
def test_building_that_is_refused(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        MultiVectorIndex.build(**arguments)


def test_a_refused_change_changes_nothing() -> None:
    index = MultiVectorIndex.build(ragged(5))
    before = index.store.version
    for change in (
        lambda: index.add([torch.randn(2, WIDTH), torch.full((3, WIDTH), torch.nan)]),
        lambda: index.add([torch.randn(2, 7)]),
        lambda: index.update([1, 2], ragged(1)),
        lambda: index.update([1], tokens=Memory(torch.ones(1, 2, WIDTH))),
        lambda: index.update([7], ragged(1)),
        lambda: index.delete([1, 7]),
    ):
        with pytest.raises((NonFiniteError, IndexMismatchError, ConfigError)):
            change()
    assert index.store.version is before


def test_a_store_of_one_vector_per_entry_is_refused() -> None:
    with pytest.raises(ConfigError, match="store 'sqlite' holds one vector for each entry"):
        MultiVectorIndex.build(ragged(2), store=SqliteStore.kind)
    with pytest.raises(ConfigError, match="'l2'"):
        MultiVectorIndex(InMemoryStore(3, "l2"))


@pytest.mark.parametrize("store", ["qdrant", "lancedb"])
def test_databases_hold_many_vectors(store: str) -> None:
    index = MultiVectorIndex.build(ragged(29), store=store)
    agree(index, asked(), 5)
    copied = MultiVectorIndex.build(ragged(29)).copy(store)
    assert isinstance(copied, MultiVectorIndex)
    agree(copied, asked(), 5)
    index.close()
    copied.close()
