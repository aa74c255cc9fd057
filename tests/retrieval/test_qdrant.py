"""QdrantIndex beside Index on the same data: equal ids, scores and vectors, in memory, in a folder, on a server."""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from qdrant_client import QdrantClient, models

from mmattn import Index
from mmattn.errors import ConfigError, IndexFileError, IndexMismatchError, MissingExtraError, NonFiniteError
from mmattn.retrieval import Hits, QdrantIndex
from mmattn.retrieval.stores.qdrant_points import ABOUT
from tests.retrieval.searching import METRICS, WIDTH, Letters, held

TEXTS = ["sun and moon", "a grey cat", "the moon"]


def same(ours: Hits, expected: Hits) -> None:
    assert ours.ids == expected.ids and ours.texts == expected.texts and ours.metadata == expected.metadata
    assert ours.mask.tolist() == expected.mask.tolist() and ours.tokens is None
    assert ours.scores[ours.mask].isfinite().all()
    torch.testing.assert_close(ours.scores, expected.scores, rtol=1e-6, atol=0)
    assert ours.vectors is not None and expected.vectors is not None and torch.equal(ours.vectors, expected.vectors)


def both(client: QdrantClient, collection: str = "mmattn", **kwargs: Any) -> tuple[QdrantIndex, Index]:
    return QdrantIndex.build(**kwargs, client=client, collection=collection), Index.build(**kwargs)


def life(client: QdrantClient, metric: str, chance: random.Random, collection: str) -> None:
    """Everything an index goes through, beside an Index that goes through the same."""
    lengths = 10.0 ** torch.tensor([-9, -5, 0, 6] if metric == "cosine" else [-1, 0, 1, 1])

    def vectors(count: int) -> torch.Tensor:
        return torch.randn(count, WIDTH) * lengths[torch.randint(4, (count, 1))]

    pair = both(
        client,
        collection,
        items=vectors(53),
        metric=metric,
        ids=[number if number % 3 else str(number) for number in range(53)],
        texts=[None if number % 7 == 5 else f"text {number}" for number in range(53)],
        metadata=[{"third": number % 3, "all": True} for number in range(53)],
    )
    for size in (1, 17, 5):
        names = chance.sample(pair[1].ids, 2 * size)
        fresh, others, queries = vectors(size), vectors(size), vectors(3)
        for index in pair:
            index.delete(names[:size])
            index.update(names[size:], others, metadata=[{"third": 1.0}] * size)
            index.add(fresh)
            index.update(names[size : size + 1], texts=["another text"])
        ours, expected = pair
        assert ours.ids == expected.ids and len(ours) == len(expected)
        assert names[0] not in ours and names[-1] in ours
        same(ours.search(queries, 11), expected.search(queries, 11))
        same(ours.search(queries, 47, filter={"third": 1}), expected.search(queries, 47, filter={"third": 1}))
        bar = float(expected.search(queries, 5).scores[0, 3])
        same(ours.search(queries, 5, score_threshold=bar), expected.search(queries, 5, score_threshold=bar))
    assert held(pair[0]) == held(pair[1])


@pytest.mark.parametrize("metric", METRICS)
def test_it_goes_through_what_an_index_goes_through(metric: str, seeded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmattn.retrieval.stores.qdrant._NUMBERS", 5 * WIDTH)  # so that every request is one of several
    life(QdrantClient(":memory:"), metric, random.Random(seeded), "mmattn")


@pytest.fixture
def server() -> Iterator[tuple[QdrantClient, str]]:
    address = os.environ.get("QDRANT_URL")
    if not address:
        pytest.skip("set QDRANT_URL to the address of a Qdrant server, such as http://localhost:6333")
    client, collection = QdrantClient(url=address), f"mmattn-test-{uuid.uuid4()}"
    yield client, collection
    client.delete_collection(collection)
    client.close()


def test_it_goes_through_the_same_on_a_server(server: tuple[QdrantClient, str], seeded: int) -> None:
    client, collection = server
    for metric in METRICS:
        life(client, metric, random.Random(seeded), collection)
        again = QdrantIndex.open(client=client, collection=collection, metric=metric)
        assert again.ids and again.dim == WIDTH
        client.delete_collection(collection)


EQUAL: list[dict[str, Any]] = [
    {"a": 1},
    {"a": True},
    {"a": 1.0},
    {"a": "1"},
    {"a": None},
    {"a": 0.1},
    {"a": ["x", "y"]},
    {"a": "x"},
    {"a": {"b": 1, "c": 2}},
    {"a": {"b": 1}},
    {"a.b": 1},
    {"a": 1, "b": 2},
    {"b": 2},
    {"nobody": None},
]


def test_filters_compare_as_python_does() -> None:
    """Not as Qdrant does, to which a list is each of its values, "a.b" a path, and 1.0 nothing it can look up."""
    metadata = [*EQUAL, {"a": {"c": 2, "b": True}}, {"a": []}, None, ["a", 1], "a", {}]
    ours, expected = both(QdrantClient(":memory:"), items=torch.randn(len(metadata), WIDTH), metadata=metadata)
    query = torch.randn(1, WIDTH)
    for wanted in EQUAL:
        same(ours.search(query, len(metadata), filter=wanted), expected.search(query, len(metadata), filter=wanted))
    assert int(ours.search(query, 7, filter={"a": 1}).mask.sum()) == 4
    with pytest.raises(ConfigError, match="filter must be plain JSON"):
        ours.search(query, 1, filter={"a": float("nan")})


def test_a_folder_is_opened_again(tmp_path: Path) -> None:
    index = QdrantIndex.build(
        TEXTS, encoder=Letters(), ids=["x", 7, "7"], metadata=[{"n": 1}, None, [1]], location=tmp_path
    )
    query, before = Letters().encode(["the moon"]), held(index)
    expected = index.search(query, 5)
    index.delete(["x"])
    index.client.close()
    again = QdrantIndex.open(tmp_path, encoder=Letters())
    assert again.ids == (7, "7") and held(again) == {name: before[name] for name in (7, "7")}
    assert again.metric == "cosine" and again["7"][:3] == ("7", "the moon", [1])
    assert again.search("the moon", 1).scores[0, 0] == expected.scores[0, 0]
    assert again.add(["a fourth"]) == (8,) and again.ids == (7, "7", 8)
    for arguments, match in (
        ({"encoder": Letters(seed=2)}, "entries were encoded by"),
        ({"encoder": Letters(7)}, "encoder has width 7 and the index has width 31"),
        ({"metric": "l2"}, "'mmattn' has metric 'cosine', not 'l2'"),
    ):
        with pytest.raises(IndexMismatchError, match=match):
            QdrantIndex.open(client=again.client, **arguments)
    with pytest.raises(IndexMismatchError, match="width 7 and the index has width 31"):
        QdrantIndex.open(client=again.client).add(torch.ones(1, 7))
    again.client.close()


def test_collections_of_others_are_left_alone() -> None:
    client = QdrantClient(":memory:")
    client.create_collection("other", vectors_config=models.VectorParams(size=WIDTH, distance=models.Distance.DOT))
    with pytest.raises(IndexFileError, match=r"no collection 'mmattn', only \['other'\]"):
        QdrantIndex.open(client=client)
    with pytest.raises(IndexFileError, match="has not made collection 'other'"):
        QdrantIndex.open(client=client, collection="other")
    with pytest.raises(ConfigError, match="a collection 'other' already"):
        QdrantIndex.build(torch.eye(WIDTH), client=client, collection="other")
    assert client.count("other").count == 0


def test_a_copy_is_saved_and_opened_in_memory(tmp_path: Path) -> None:
    index = QdrantIndex.build(torch.eye(3), ids=["a", "b", 7], metadata=[{"n": 1}, None, {"n": 2}])
    index.delete(["b"])
    index.save(tmp_path / "copy")
    for loaded in (Index.load(tmp_path / "copy"), QdrantIndex.load(tmp_path / "copy")):
        assert loaded.store.kind == "qdrant" and loaded.ids == ("a", 7) and held(loaded) == held(index)
        assert loaded.add(torch.ones(1, 3)) == (8,) and loaded.ids == ("a", 7, 8)
    assert index.ids == ("a", 7)
    Index.build(torch.eye(3)).save(tmp_path / "other")
    with pytest.raises(ConfigError, match="over a QdrantStore, got the store 'exact'"):
        QdrantIndex.load(tmp_path / "other")


def test_a_collection_that_was_changed_is_refused() -> None:
    client = QdrantClient(":memory:")
    QdrantIndex.build(torch.eye(3), client=client)
    good = client.retrieve("mmattn", [ABOUT])[0].payload
    changes: list[dict[str, Any]] = [{**good, name: value} for name in good for value in ([], -1.5, {"a": 1})]
    changes += [{key: value for key, value in good.items() if key != name} for name in good]
    for payload in changes:
        client.upsert("mmattn", [models.PointStruct(id=ABOUT, vector={}, payload=payload)])
        with pytest.raises(IndexFileError):
            QdrantIndex.open(client=client)


def test_a_build_that_fails_half_way_leaves_no_collection() -> None:
    client = QdrantClient(":memory:")
    with pytest.raises(ConfigError, match="64 bits"):
        QdrantIndex.build(torch.eye(3), ids=[1, 2, 1 << 63], client=client)
    assert not client.collection_exists("mmattn")


def test_a_refused_build_leaves_no_collection() -> None:
    client = QdrantClient(":memory:")
    with pytest.raises(NonFiniteError, match="row 1"):
        QdrantIndex.build([[1.0], [float("nan")]], client=client)
    assert not client.collection_exists("mmattn")
    assert len(QdrantIndex.build([[1.0]], client=client)) == 1


def test_ints_that_qdrant_would_round() -> None:
    index = QdrantIndex.build(torch.eye(WIDTH), ids=[-(1 << 63), (1 << 63) - 1, *range(2, WIDTH)])
    assert (1 << 63) - 1 in index and index[-(1 << 63)].id == -(1 << 63)
    index = QdrantIndex.build(torch.eye(WIDTH))
    for change in (
        lambda: index.add(torch.ones(1, WIDTH), ids=[1 << 63]),
        lambda: index.add(torch.ones(1, WIDTH), metadata=[{"n": [1 << 64]}]),
        lambda: index.update([0], metadata=[-(1 << 64)]),
    ):
        with pytest.raises(ConfigError, match="64 bits, got -?[0-9]+; write it as text"):
            change()
    assert len(index) == WIDTH and index[0].metadata is None


def test_ids_have_the_same_points_for_ever() -> None:
    """In collections that were made, they are what they are."""
    index = QdrantIndex.build(torch.eye(2), ids=[1, "1"])
    points, _ = index.client.scroll("mmattn", with_vectors=True)
    found = {point.id: (point.payload["id"], point.vector["vector"]) for point in points if "id" in point.payload}
    assert found == {
        "599ae8f1-0430-5cdc-a98f-bc74e23890c7": (1, [1.0, 0.0]),
        "a0831065-af2e-56ef-b77d-99d2bdba2b6f": ("1", [0.0, 1.0]),
    }


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(MissingExtraError, match=r"mmattn\[scale\]"):
        QdrantIndex.build(torch.eye(2))


def test_an_id_that_is_taken_is_refused_and_nothing_changes() -> None:
    index = QdrantIndex.build(torch.eye(3), ids=["a", "b", "c"], client=QdrantClient(":memory:"), collection="taken")
    with pytest.raises(IndexMismatchError, match="'b'"):
        index.add(-torch.eye(3)[:2], ids=["d", "b"])
    assert list(index.ids) == ["a", "b", "c"] and index.search([0.0, 1.0, 0.0], 1).ids == [["b"]]


@pytest.mark.parametrize("numbers", [(3, 0, 1, 2), (1, 0, 3, 2), (1, 0, 2, 3)])
def test_what_float32_cannot_tell_apart_is_told_apart(numbers: tuple[int, ...]) -> None:
    vectors = torch.tensor([[1e8, float(number), -1e8] for number in numbers])
    index = QdrantIndex.build(vectors, metric="ip", client=QdrantClient(":memory:"), collection="near")
    assert index.search([1.0, 1.0, 1.0], 1).ids == [[numbers.index(3)]]
    assert index.search([1.0, 1.0, 1.0], 3).scores.tolist() == [[3.0, 2.0, 1.0]]
