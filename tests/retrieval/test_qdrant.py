"""An index over a Qdrant collection beside one in memory: equal ids, scores and vectors, in memory and on a server."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from qdrant_client import QdrantClient, models

from mmattn import Index
from mmattn.errors import ConfigError, IndexFileError, NonFiniteError
from mmattn.retrieval import Hits, QdrantStore
from mmattn.retrieval.stores.qdrant_points import ABOUT
from tests.retrieval.searching import METRICS, WIDTH, held


def connect(client: QdrantClient, **settings: Any) -> Index:
    return Index(QdrantStore.connect(client=client, **settings))


def same(ours: Hits, expected: Hits) -> None:
    assert ours.ids == expected.ids and ours.texts == expected.texts and ours.metadata == expected.metadata
    assert ours.mask.tolist() == expected.mask.tolist() and ours.tokens is None
    torch.testing.assert_close(ours.scores, expected.scores, rtol=1e-6, atol=0)
    assert ours.vectors is not None and expected.vectors is not None and torch.equal(ours.vectors, expected.vectors)


def life(client: QdrantClient, metric: str, chance: random.Random, collection: str) -> None:
    """Everything an index goes through, beside an index in memory that goes through the same."""
    lengths = 10.0 ** torch.tensor([-9, -5, 0, 6] if metric == "cosine" else [-1, 0, 1, 1])

    def vectors(count: int) -> torch.Tensor:
        return torch.randn(count, WIDTH) * lengths[torch.randint(4, (count, 1))]

    arguments: dict[str, Any] = {
        "items": vectors(53),
        "metric": metric,
        "ids": [number if number % 3 else str(number) for number in range(53)],
        "texts": [None if number % 7 == 5 else f"text {number}" for number in range(53)],
        "metadata": [{"third": number % 3, "all": True} for number in range(53)],
    }
    ours = Index.build(**arguments, store="qdrant", client=client, collection=collection)
    expected = Index.build(**arguments)
    for size in (1, 17, 5):
        names = chance.sample(expected.ids, 2 * size)
        fresh, others, queries = vectors(size), vectors(size), vectors(3)
        for index in (ours, expected):
            index.delete(names[:size])
            index.update(names[size:], others, metadata=[{"third": 1.0}] * size)
            index.add(fresh)
            index.update(names[size : size + 1], texts=["another text"])
        assert ours.ids == expected.ids and len(ours) == len(expected)
        assert names[0] not in ours and names[-1] in ours
        same(ours.search(queries, 11), expected.search(queries, 11))
        same(ours.search(queries, 47, filter={"third": 1}), expected.search(queries, 47, filter={"third": 1}))
    assert held(ours) == held(expected)


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
        again = connect(client, collection=collection)
        assert again.ids and (again.dim, again.metric) == (WIDTH, metric)
        client.delete_collection(collection)


def test_collections_of_others_are_left_alone() -> None:
    client = QdrantClient(":memory:")
    client.create_collection("other", vectors_config=models.VectorParams(size=WIDTH, distance=models.Distance.DOT))
    with pytest.raises(IndexFileError, match=r"no collection 'mmattn', only \['other'\]"):
        connect(client)
    with pytest.raises(IndexFileError, match="collection 'other' is not of this version of mmattn"):
        connect(client, collection="other")
    with pytest.raises(ConfigError, match="a collection 'other' already"):
        Index.build(torch.eye(WIDTH), store="qdrant", client=client, collection="other")
    assert client.count("other").count == 0


def test_a_copy_is_saved_and_opened_in_memory(tmp_path: Path) -> None:
    index = Index.build(torch.eye(3), ids=["a", "b", 7], metadata=[{"n": 1}, None, {"n": 2}], store="qdrant")
    index.delete(["b"])
    index.save(tmp_path / "copy")
    loaded = Index.load(tmp_path / "copy")
    assert loaded.store.kind == "qdrant" and loaded.ids == ("a", 7) and held(loaded) == held(index)
    assert loaded.add(torch.ones(1, 3)) == (8,) and loaded.ids == ("a", 7, 8) and index.ids == ("a", 7)


def test_a_collection_that_was_changed_is_refused() -> None:
    client = QdrantClient(":memory:")
    Index.build(torch.eye(3), store="qdrant", client=client)
    good = client.retrieve("mmattn", [ABOUT])[0].payload
    changes: list[dict[str, Any]] = [{**good, name: value} for name in good for value in ([], -1.5)]
    changes += [{key: value for key, value in good.items() if key != name} for name in good]
    for payload in changes:
        client.upsert("mmattn", [models.PointStruct(id=ABOUT, vector={}, payload=payload)])
        with pytest.raises(IndexFileError):
            connect(client)


def test_a_build_that_fails_leaves_no_collection() -> None:
    client = QdrantClient(":memory:")
    with pytest.raises(ConfigError, match="64 bits"):
        Index.build(torch.eye(3), ids=[1, 2, 1 << 63], store="qdrant", client=client)
    assert not client.collection_exists("mmattn")
    with pytest.raises(NonFiniteError, match="row 1"):
        Index.build([[1.0], [float("nan")]], store="qdrant", client=client)
    assert not client.collection_exists("mmattn")
    assert len(Index.build([[1.0]], store="qdrant", client=client)) == 1


def test_ints_that_qdrant_would_round() -> None:
    index = Index.build(torch.eye(WIDTH), ids=[-(1 << 63), (1 << 63) - 1, *range(2, WIDTH)], store="qdrant")
    assert (1 << 63) - 1 in index and index[-(1 << 63)].id == -(1 << 63)
    index = Index.build(torch.eye(WIDTH), store="qdrant")
    for change in (
        lambda: index.add(torch.ones(1, WIDTH), ids=[1 << 63]),
        lambda: index.add(torch.ones(1, WIDTH), metadata=[{"n": [1 << 64]}]),
        lambda: index.update([0], metadata=[-(1 << 64)]),
    ):
        with pytest.raises(ConfigError, match="64 bits, got -?[0-9]+; write it as text"):
            change()
    assert len(index) == WIDTH and index[0].metadata is None


@pytest.mark.parametrize("numbers", [(3, 0, 1, 2), (1, 0, 3, 2), (1, 0, 2, 3)])
def test_near_ties_that_float32_cannot_order(numbers: tuple[int, ...]) -> None:
    vectors = torch.tensor([[1e8, float(number), -1e8] for number in numbers])
    index = Index.build(vectors, metric="ip", store="qdrant")
    assert index.search([1.0, 1.0, 1.0], 1).ids == [[numbers.index(3)]]
    assert index.search([1.0, 1.0, 1.0], 3).scores.tolist() == [[3.0, 2.0, 1.0]]
