"""What is refused when an index is built or asked, and what the messages say."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from qdrant_client import QdrantClient

from mmattn import Index, Memory
from mmattn.errors import ConfigError, IndexMismatchError, MissingExtraError, ShapeError, TextError
from tests.retrieval.searching import KINDS, WIDTH, Letters, built, small


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("queries", "error", "match"),
    [
        (torch.randn(2, 7), IndexMismatchError, "width 7 and the index has width 12"),
        (torch.randn(7), IndexMismatchError, "width 7 and the index has width 12"),
        (np.zeros((2, 5)), IndexMismatchError, "width 5 and the index has width 12"),
        (Memory(torch.randn(2, 1, 7)), IndexMismatchError, "width 7 and the index has width 12"),
        (Memory(torch.randn(2, 3, WIDTH)), ShapeError, "one real slot per row"),
        (Memory(torch.ones(1, 1, WIDTH), mask=torch.tensor([[False]])), ShapeError, "one real slot per row"),
        (torch.randn(2, 3, WIDTH), ShapeError, r"\(b, e\), got \(2, 3, 12\)"),
        (torch.ones(2, WIDTH, dtype=torch.bool), ShapeError, "real numbers"),
        (None, ShapeError, "NoneType"),
        ([[1.0], [2.0, 3.0]], ShapeError, "numbers"),
        (["a text"], ConfigError, "no(ne| encoder)"),
    ],
)
def test_queries(queries: Any, error: type[Exception], match: str, kind: str) -> None:
    """Invariant 79."""
    with pytest.raises(error, match=match):
        small(3, store=kind).search(queries, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, -1, 2.0, True, None])
def test_top_k(top_k: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match="top_k"):
        small(3, store=kind).search(torch.randn(1, WIDTH), top_k)


@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_and_filters(kind: str) -> None:
    index = small(3, store=kind)
    with pytest.raises(ConfigError, match="score_threshold"):
        index.search(torch.randn(1, WIDTH), 1, score_threshold=float("nan"))
    with pytest.raises(ConfigError, match="filter must be a dict"):
        index.search(torch.randn(1, WIDTH), 1, filter="lang=de")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queries", "match"),
    [("", "query 0 is empty"), (["a", " \n"], "query 1 is empty"), (["a", None], "text 1.*None"), ([b"a"], "text 0")],
)
def test_query_texts(queries: Any, match: str) -> None:
    index = Index.build(["a text"], encoder=Letters())
    with pytest.raises(TextError, match=match):
        index.search(queries, 1)


def test_rows_of_a_data_set_are_no_entries() -> None:
    with pytest.raises(ShapeError, match="metadata=rows"):
        Index.build([{"text": "a"}, {"text": "b"}], encoder=Letters())


@pytest.mark.parametrize("kind", KINDS)
def test_another_encoder_is_known_by_its_fingerprint(kind: str) -> None:
    encoder = Letters(seed=1)
    index = built(["a text", "another"], kind, encoder=encoder)
    other = Letters(seed=2)
    with pytest.raises(IndexMismatchError, match=f"{encoder.fingerprint[:16]}.*{other.fingerprint[:16]}"):
        Index(index.store, other)
    assert Index(index.store, Letters(seed=1)).search(encoder.encode(["a text"]), 1).ids == [[0]]
    with pytest.raises(IndexMismatchError, match="width 7 and the index has width 31"):
        Index(index.store, Letters(7))
    encoder.seed = 2
    with pytest.raises(IndexMismatchError, match="weights have changed"):
        index.search("a text", 1)
    with pytest.raises(IndexMismatchError, match="weights have changed"):
        index.add(["a third"])


class Tokens(Letters):
    """Gives every letter a slot: not what an index compares."""

    def encode(self, texts: list[str]) -> Memory:
        return Memory.pad([torch.ones(len(text), self.dim) for text in texts])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"items": ["a", "b"]}, ConfigError, "texts need an encoder"),
        ({"items": ["a", None], "encoder": Letters()}, TextError, "text 1.*None"),
        ({"items": ["a"], "encoder": Letters(), "texts": ["b"]}, ConfigError, "texts themselves"),
        ({"items": ["abc", "de"], "encoder": Tokens()}, ShapeError, "an encoder that pools"),
        ({"items": torch.ones(2, 7), "encoder": Letters()}, IndexMismatchError, "width 7 and the index has width 31"),
        ({"items": []}, ShapeError, r"torch.empty\(0, e\)"),
        ({"items": torch.ones(7)}, ShapeError, r"vector\[None\]"),
        ({"items": torch.ones(2, 3), "metric": "dot"}, ConfigError, "'cosine', 'ip', 'l2'; got 'dot'"),
        ({"items": torch.ones(2, 3), "store": "annoy"}, ConfigError, "store must be one of 'exact'.*'annoy'"),
        ({"items": torch.ones(2, 3), "texts": ["a"]}, IndexMismatchError, "texts.* 1 for 2"),
        ({"items": torch.ones(2, 3), "ids": "ab"}, ConfigError, "ids must be a list"),
        ({"items": torch.ones(2, 3), "tokens": torch.ones(2, 3, 5)}, ShapeError, "tokens must be a Memory"),
        ({"items": torch.ones(2, 3), "tokens": Memory(torch.ones(3, 3, 5))}, ShapeError, "3 rows for 2 entries"),
        ({"items": torch.ones(2, 10), "store": "ivfpq", "bytes": 3}, ConfigError, "bytes=3, width 10"),
    ],
)
def test_building(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Index.build(**arguments)
    if not {"store", "tokens"} & set(arguments):
        client = QdrantClient(":memory:")
        with pytest.raises(error, match=match):
            Index.build(**{"store": "qdrant", **arguments}, client=client)
        assert not client.get_collections().collections


@pytest.mark.parametrize(
    ("store", "setting", "match"),
    [
        ("hnsw", {"links": 1}, "links must be at least 2"),
        ("hnsw", {"search_effort": 0}, "search_effort must be at least 1"),
        ("ivfpq", {"lists": 2.5}, "lists must be an int"),
        ("ivf", {"visited": 0}, "visited must be"),
    ],
)
def test_settings_of_stores(store: str, setting: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Index.build(torch.ones(2, 3), store=store, **setting)
    with pytest.raises(TypeError, match="metdata"):
        Index.build(torch.ones(2, 3), store=store, metdata=[{}, {}])


def test_an_empty_list_of_texts_waits_for_more() -> None:
    index = Index.build([], encoder=Letters())
    assert len(index) == 0 and index.dim == 31 and not index.search("anything", 3).mask.any()
    index.add(["a text"])
    assert index.search("a text", 2).ids == [[0, None]]


def test_the_exact_store_needs_no_faiss_and_the_others_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert Index.build(torch.eye(3)).search(torch.eye(3)[1], 1).ids == [[1]]
    with pytest.raises(MissingExtraError, match=r"mmattn\[rag\]"):
        Index.build(torch.eye(3), store="hnsw")


class TestArrays:
    """Vectors in whatever holds numbers."""

    given = np.random.RandomState(0).randn(6, 4)

    @pytest.mark.parametrize(
        "as_given",
        [
            lambda a: a[::-1][::-1],
            lambda a: np.asfortranarray(a),
            lambda a: a.astype(">f8"),
            lambda a: a.astype(np.longdouble),
            lambda a: np.ma.masked_array(a),
            lambda a: [*a],
            lambda a: [*torch.tensor(a)],
            lambda a: tuple(map(list, a)),
            lambda a: pd.DataFrame(a),
            lambda a: pd.DataFrame(a, columns=list("abcd")),
        ],
    )
    def test_of_any_layout(self, as_given: Any) -> None:
        """Invariant 135. A caller's array stays as it is, and is not held."""
        given = as_given(self.given)
        index = Index.build(given)
        assert torch.allclose(torch.stack([index[n].vector for n in range(6)]), torch.tensor(self.given).float())
        assert index.search(as_given(self.given), 1).ids == [[n] for n in range(6)]

    def test_negative_strides_and_read_only_ones(self) -> None:
        """Invariant 135."""
        fixed = self.given.copy()
        fixed.flags.writeable = False
        for given in (fixed, fixed[::-1], fixed[:, ::-1], fixed[::2]):
            index = Index.build(given)
            assert torch.allclose(index[0].vector, torch.tensor(given[0].copy()).float())

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            (np.ma.masked_array(given, given > 1), "masked"),
            (given.astype(object), "object"),
            (given > 0, "real numbers"),
            (given + 1j, "real numbers"),
            ([given[0], given[1][:3]], "numbers"),
            (pd.DataFrame({"a": [1.0], "b": ["x"]}), "DataFrame"),
            (np.array(["a", "b"]), "ndarray"),
        ],
    )
    def test_what_has_no_numbers_is_refused(self, given: Any, match: str) -> None:
        """Invariant 135."""
        with pytest.raises(ShapeError, match=match):
            Index.build(given)


def test_ids_and_filters_are_compared_exactly() -> None:
    """Invariant 164: a name composed and decomposed is two ids, two texts and two values."""
    composed, decomposed = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))
    index = Index.build(
        torch.eye(3)[:2], ids=[composed, decomposed], metadata=[{"city": composed}, {"city": decomposed}]
    )
    for name, row in ((composed, 0), (decomposed, 1)):
        assert index.search(torch.eye(3)[2:], 2, filter={"city": name}).ids == [[name, None]]
        assert index.search(torch.eye(3)[row], 1).ids == [[name]]
