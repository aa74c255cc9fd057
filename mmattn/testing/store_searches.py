"""Checks of stores: what a search finds, with filters and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError
from mmattn.retrieval.entries import Entries, Filter
from mmattn.retrieval.index import Index
from mmattn.retrieval.scoring import METRICS, score
from mmattn.retrieval.stores.base import Candidates, VectorStore, find_store

MakeStore = Callable[[int, str], VectorStore]

WIDTH = 12


def normal(count: int, seed: int = 0) -> Tensor:
    """Vectors (n, e), normally distributed, the same for the same seed."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def filled(
    make: MakeStore, metric: str, vectors: Tensor, metadata: Sequence[Any] | None = None, **columns: Any
) -> Index:
    index = Index(make(WIDTH, metric))
    index.add(vectors, metadata=metadata, **columns)
    return index


def candidates_of(store: VectorStore, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
    """Return the candidates of the store itself, after a check of their form."""
    found = store.search(queries, top_k, filter)
    rows, entries = found.rows, found.entries
    assert isinstance(entries, Entries), f"a search gives Candidates of Entries, got {type(entries).__name__}"
    assert rows.dtype == torch.int64 and rows.dim() == 2 and len(rows) == len(queries), (
        f"rows must be int64 (b, c) with b = {len(queries)}, got {rows.dtype} {tuple(rows.shape)}"
    )
    assert not rows.numel() or -1 <= int(rows.min()) <= int(rows.max()) < len(entries), "rows beyond the entries"
    for line in rows.tolist():
        proposed = [row for row in line if row >= 0]
        assert len(set(proposed)) == len(proposed), f"an entry is proposed twice: {proposed}"
    place = {name: row for row, name in enumerate(store.ids)}
    places = [place[name] for name in entries.ids]
    assert places == sorted(places), "the entries of candidates are in the order of adding"
    return found


def ids_of(index: Index, queries: Tensor, top_k: int, filter: Filter | None = None) -> list[list[Any]]:
    candidates_of(index.store, queries, top_k, filter)
    hits = index.search(queries, top_k, filter=filter)
    assert hits.ids is not None
    return hits.ids


def best_of(vectors: Tensor, queries: Tensor, metric: str, count: int) -> list[list[int]]:
    """The best rows by the definition: every score, and equal ones in their order."""
    scores = torch.cat([score(query[None], vectors[None], metric) for query in queries])
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].tolist()


def same(a: Index, b: Index, metric: str) -> None:
    one, two = a.store.get(a.ids), b.store.get(b.ids)
    assert (one.ids, one.texts, one.metadata) == (two.ids, two.texts, two.metadata), "other entries were loaded"
    assert torch.equal(one.vectors, two.vectors), "other vectors were loaded"
    queries = normal(3, seed=5)
    assert a.search(queries, 7).ids == b.search(queries, 7).ids, f"{metric}: what was loaded finds something else"
    if all(isinstance(value, dict) for value in one.metadata):
        assert a.search(queries, 7, filter={"n": 2}).ids == b.search(queries, 7, filter={"n": 2}).ids


def check_new(make: MakeStore) -> None:
    """A new store is empty and registered, has the width and metric it was made with, and gives `about` back."""
    for metric in METRICS:
        store = make(WIDTH, metric)
        assert (store.dim, store.metric, len(store), store.ids) == (WIDTH, metric, 0, ())
        assert store.about.get("encoder") is None and store.about.get("next_id", 0) == 0
        store.about = {"encoder": "abc", "next_id": 3}
        assert store.about == {"encoder": "abc", "next_id": 3}
        assert find_store(store.kind) is type(store), f"{type(store).__name__} is not registered as {store.kind!r}"
        assert 0 < store.recall <= 1


def check_empty(make: MakeStore) -> None:
    """An empty store finds nothing, and a store asked nothing answers nothing."""
    index = filled(make, "ip", torch.empty(0, WIDTH))
    assert not index.search(normal(2), 5).mask.any()
    assert not index.search(normal(2), 5, filter={"a": 1}).mask.any()
    assert len(filled(make, "ip", normal(7)).search(torch.empty(0, WIDTH), 3)) == 0


def check_best(make: MakeStore) -> None:
    """A search finds the best k of its metric, on average the share of them that the store declares."""
    for metric in METRICS:
        vectors, queries = normal(1201), normal(7, seed=1)
        found = ids_of(filled(make, metric, vectors), queries, 10)
        best = best_of(vectors, queries, metric, 10)
        share = sum(len(set(a) & set(b)) for a, b in zip(found, best, strict=True)) / (7 * 10)
        assert share >= make(WIDTH, metric).recall, f"{metric}: found {share:.3f} of the best"


def check_near_ties(make: MakeStore) -> None:
    """A store of recall 1 finds exactly the best, also among entries closer together than float32 can tell."""
    for metric in METRICS:
        if make(WIDTH, metric).recall == 1:
            vectors = normal(1) + 1e-6 * normal(701)
            index = filled(make, metric, vectors, [{"part": row % 3} for row in range(701)])
            queries = normal(1) + 1e-3 * normal(3, seed=1)
            assert ids_of(index, queries, 10) == best_of(vectors, queries, metric, 10), metric
            third = [[3 * row + 1 for row in line] for line in best_of(vectors[1::3], queries, metric, 10)]
            assert ids_of(index, queries, 10, {"part": 1}) == third, f"{metric}, with a filter"


def check_scores(make: MakeStore) -> None:
    """Scores are those of the full vectors in float64, the best first, and equal ones in the order of adding."""
    for metric in METRICS:
        vectors, queries = normal(5)[torch.arange(45) % 5], normal(3, seed=1)
        hits = filled(make, metric, vectors).search(queries, 45)
        assert hits.ids is not None and hits.vectors is not None
        for query, names, scores in zip(queries, hits.ids, hits.scores, strict=True):
            rows = [name for name in names if name is not None]
            true = score(query[None], vectors[rows][None], metric)[0]
            assert torch.equal(scores[: len(rows)], true), f"{metric}: scores {scores.tolist()}, true {true.tolist()}"
            assert rows == sorted(rows, key=lambda row: (-float(true[rows.index(row)]), row)), metric


def check_lengths(make: MakeStore) -> None:
    """Vectors may have any length up to 1e18, also none where the metric is not the cosine."""
    for metric in METRICS:
        vectors = normal(29) * 10.0 ** torch.linspace(-18, 16, 29)[:, None]
        if metric != "cosine":
            vectors[3:7] = 0
        for query in (normal(1, seed=1), 1e-15 * normal(1, seed=2), 1e15 * normal(1, seed=3)):
            hits = filled(make, metric, vectors).search(query, 29)
            assert hits.scores[hits.mask].isfinite().all(), metric
            if make(WIDTH, metric).recall == 1:
                assert hits.ids == best_of(vectors, query, metric, 29), metric


def check_more_than_there_is(make: MakeStore) -> None:
    """Asked for more than it has, a store finds each entry once."""
    for metric in METRICS:
        (names,) = ids_of(filled(make, metric, normal(5)), normal(1, seed=1), 11)
        assert sorted(names[:5]) == [0, 1, 2, 3, 4] and names[5:] == [None] * 6, f"{metric}: {names}"


def check_batches(make: MakeStore) -> None:
    """A query finds in a batch what it finds alone."""
    index, queries = filled(make, "cosine", normal(97)), normal(5, seed=1)
    assert ids_of(index, queries, 7) == [ids_of(index, query[None], 7)[0] for query in queries]


def check_filters(make: MakeStore) -> None:
    """A search finds all entries that a filter allows and no other: equal, zero or tiny vectors, few or many."""
    for metric in METRICS:
        ordinary = {"normal": normal(61), "equal": torch.ones(61, WIDTH), "tiny": 1e-18 * normal(61)}
        zero = {} if metric == "cosine" else {"zero": torch.zeros(61, WIDTH)}
        for name, vectors in {**ordinary, **zero}.items():
            index = filled(make, metric, vectors, [{"n": row, "third": row % 3} for row in range(61)])
            for wanted, rows in (({"third": 1}, range(1, 61, 3)), ({"n": 5}, [5]), ({"n": 5, "third": 1}, [])):
                for queries in (normal(2, seed=1), 1e12 * normal(2, seed=2)):
                    for names in ids_of(index, queries, 23, wanted):
                        found = {row for row in names if row is not None}
                        assert found <= set(rows), f"{metric}, {name} vectors, {wanted}: found {sorted(found)}"
                        assert len(found) == len(rows), f"{metric}, {name} vectors, {wanted}: only {sorted(found)}"


def check_filter_values(make: MakeStore) -> None:
    """A filter compares values as Python does: 1 is 1.0 and True, not "1"; a key that is missing is not None."""
    values = [1, 1.0, True, "1", None, [1, "a"], {"b": 0, "a": [None]}, 0.5, "ü🌷"]
    metadata: list[Any] = [
        *({"value": value, "row": row} for row, value in enumerate(values)),
        {},
        None,
        ["value"],
        "value",
    ]
    index = filled(make, "ip", normal(len(metadata)), metadata)
    for wanted in (*values, 2, "A", {}, [1], {"a": [None]}):
        rows = [row for row, value in enumerate(values) if value == wanted]
        (names,) = ids_of(index, normal(1, seed=1), 13, {"value": wanted})
        assert sorted(name for name in names if name is not None) == rows, f"{wanted!r}: found {names}"
    (names,) = ids_of(index, normal(1, seed=1), 13, {})
    assert sorted(name for name in names if name is not None) == list(range(13)), "{} allows all"


def check_filter_spellings(make: MakeStore) -> None:
    """A filter is compared as JSON: a tuple is a list, a number as a key its text; what JSON lacks is refused."""
    index = filled(make, "ip", normal(2), [{"a": [1, 2], "b": {"2": 3}, "3": "c"}, {"a": (2, 1)}])
    spelt: list[Any] = [{"a": (1, 2)}, {"b": {2: 3}}, {3: "c"}, {"a": [1.0, True + 1]}]
    for wanted in spelt:
        assert ids_of(index, normal(1, seed=1), 2, wanted) == [[0, None]], wanted
    for refused in ({"a": {1, 2}}, {"a": float("nan")}, {"a": object()}, {"b": {2: 3, "2": 3}}):
        try:
            index.search(normal(1, seed=1), 1, filter=refused)
        except ConfigError:
            continue
        raise AssertionError(f"the filter {refused} was not refused")


def check_metadata_is_handed_out_as_a_copy(make: MakeStore) -> None:
    """Whoever edits metadata that was given to an index, or by it, edits no index."""
    given = [{"k": [row], "d": {"n": row}} for row in range(3)]
    index = filled(make, "ip", normal(3), given)
    found = index.search(normal(1, seed=1), 3)
    assert found.metadata is not None and found.ids is not None
    for one in (*given, index[0].metadata, index[1].metadata, *found.metadata[0]):
        one["k"].append(99)
        one["d"]["n"] = 99
    for row in range(3):
        assert index[row].metadata == {"k": [row], "d": {"n": row}}, index[row].metadata
    again = index.search(normal(1, seed=1), 3)
    assert again.metadata is not None and again.ids is not None
    assert [one["d"]["n"] for one in again.metadata[0]] == again.ids[0], again.metadata


def check_filter_functions(make: MakeStore) -> None:
    """A function of the metadata filters as it says, or is refused by ConfigError."""
    index = filled(make, "ip", normal(31), list(range(31)))
    try:
        (names,) = ids_of(index, normal(1, seed=1), 31, lambda value: value % 7 == 2)
    except ConfigError:
        return
    assert sorted(name for name in names if name is not None) == [2, 9, 16, 23, 30], names
