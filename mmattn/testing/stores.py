"""Checks of stores: what a search finds, and entries added, updated, deleted, saved and loaded."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError
from mmattn.memory import Memory
from mmattn.retrieval.entries import Entries, Filter, check_filter
from mmattn.retrieval.index import Index
from mmattn.retrieval.scoring import METRICS, score
from mmattn.retrieval.stores import STORES, Candidates, VectorStore
from mmattn.testing.case import refuses

MakeStore = Callable[[int, str], VectorStore]

WIDTH = 12


def normal(count: int, seed: int = 0) -> Tensor:
    """Vectors (n, e), normally distributed, the same for the same seed."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def filled(
    make: MakeStore, metric: str, vectors: Tensor, metadata: Sequence[object] | None = None, **columns: Any
) -> Index:
    index = Index(make(WIDTH, metric))
    index.add(vectors, metadata=metadata, **columns)
    return index


def candidates_of(store: VectorStore, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
    """Return the candidates of the store itself, after a check of their form."""
    hits = store.search(queries, top_k, check_filter(filter))
    rows, entries = hits.rows, hits.entries
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
    return hits


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
    """A new store is empty and registered, has the width and metric it was made with, gives `about` back, is closed."""
    for metric in METRICS:
        store = make(WIDTH, metric)
        assert (store.dim, store.metric, len(store), store.ids) == (WIDTH, metric, 0, ())
        assert store.about.get("encoder") is None and store.about.get("next_id", 0) == 0
        store.about = {"encoder": "abc", "next_id": 3}
        assert store.about == {"encoder": "abc", "next_id": 3}
        assert STORES.get(store.kind) is type(store), f"{type(store).__name__} is not registered as {store.kind!r}"
        assert 0 < store.recall <= 1
        index = Index(store)
        assert not index.search(normal(2), 5).mask.any() and not index.search(normal(2), 5, filter={"a": 1}).mask.any()
        index.add(normal(7))
        assert len(index.search(torch.empty(0, WIDTH), 3)) == 0
        store.close()
        store.close()


def check_best(make: MakeStore) -> None:
    """A search finds the best k of its metric, on average the share of them that the store declares."""
    for metric in METRICS:
        vectors, queries = normal(1201), normal(7, seed=1)
        index = filled(make, metric, vectors)
        ids = ids_of(index, queries, 10)
        assert ids[2:3] == ids_of(index, queries[2:3], 10), f"{metric}: a query finds something else alone"
        best = best_of(vectors, queries, metric, 10)
        share = sum(len(set(a) & set(b)) for a, b in zip(ids, best, strict=True)) / (7 * 10)
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
    """Each entry is found once, with its score in float64, the best first, and equal ones in the order of adding."""
    for metric in METRICS:
        vectors, queries = normal(5)[torch.arange(45) % 5], normal(3, seed=1)
        hits = filled(make, metric, vectors).search(queries, 51)
        assert hits.ids is not None and hits.vectors is not None
        for query, names, scores in zip(queries, hits.ids, hits.scores, strict=True):
            rows = [int(name) for name in names if name is not None]
            assert sorted(rows) == list(range(45)) and names[45:] == [None] * 6, f"{metric}: {names}"
            true = score(query[None], vectors[rows][None], metric)[0]
            assert torch.equal(scores[:45], true), f"{metric}: scores {scores.tolist()}, true {true.tolist()}"
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
                        hits = {row for row in names if row is not None}
                        assert hits <= set(rows), f"{metric}, {name} vectors, {wanted}: found {sorted(hits)}"
                        assert len(hits) == len(rows), f"{metric}, {name} vectors, {wanted}: only {sorted(hits)}"


def check_filter_values(make: MakeStore) -> None:
    """A filter compares as Python does, a list by each of its values; a key that no entry has is refused."""
    values = [1, 1.0, True, "1", None, [1, "a"], {"b": 0, "a": [None]}, 0.5, "ü🌷"]
    metadata: list[object] = [
        *({"value": value, "row": row} for row, value in enumerate(values)),
        {},
        None,
        ["value"],
        "value",
    ]
    index = filled(make, "ip", normal(len(metadata)), metadata)
    for wanted in (*values, 2, "A", {}, [], [1], ["1", 0.5, 2], [None, "a"], [[1, "a"]], {"a": [None]}):
        allowed = wanted if isinstance(wanted, list) else [wanted]
        owned = [value if isinstance(value, list) else [value] for value in values]
        rows = [row for row, own in enumerate(owned) if any(value in allowed for value in own)]
        (names,) = ids_of(index, normal(1, seed=1), 13, {"value": wanted})
        assert sorted(name for name in names if name is not None) == rows, f"{wanted!r}: found {names}"
    (names,) = ids_of(index, normal(1, seed=1), 13, {})
    assert sorted(name for name in names if name is not None) == list(range(13)), "{} allows all"
    (names,) = ids_of(index, normal(1, seed=1), 13, {"value": [1, "1"], "row": [3, 5, 8]})
    assert sorted(name for name in names if name is not None) == [3, 5], "each key allows one of its values"
    for wanted in ({"valeu": 1}, {"value": 1, "raw": 0}):
        refuses(ConfigError, partial(index.search, normal(1, seed=1), 1, filter=wanted), f"the filter {wanted}")
    assert ids_of(filled(make, "ip", normal(0)), normal(1), 2, {"value": 1}) == [[None, None]], "no entries"


def check_filter_spellings(make: MakeStore) -> None:
    """A filter is compared as JSON: a tuple is a list, a number as a key its text; or it is a function, or refused."""
    index = filled(make, "ip", normal(2), [{"a": [3, 2], "b": {"2": 3}, "3": "c"}, {"a": (2, 1)}])
    spelt: list[Any] = [{"a": (3, 4)}, {"b": {2: 3}}, {3: "c"}, {"a": [3.0, True + 4]}]
    for wanted in spelt:
        assert ids_of(index, normal(1, seed=1), 2, wanted) == [[0, None]], wanted
    spoilt: tuple[Filter, ...] = ({"a": {1, 2}}, {"a": float("nan")}, {"a": object()}, {"b": {2: 3, "2": 3}})
    for refused in spoilt:
        refuses(ConfigError, partial(index.search, normal(1, seed=1), 1, filter=refused), f"the filter {refused}")
    with suppress(ConfigError):
        assert ids_of(index, normal(1, seed=1), 2, lambda entry: "b" in entry) == [[0, None]], "a function"


def check_metadata_is_handed_out_as_a_copy(make: MakeStore) -> None:
    """Whoever edits metadata that was given to an index, or by it, edits no index."""
    metadata = [{"k": [row], "d": {"n": row}} for row in range(3)]
    index = filled(make, "ip", normal(3), metadata)
    hits = index.search(normal(1, seed=1), 3)
    assert hits.metadata is not None and hits.ids is not None
    for one in (*metadata, index[0].metadata, index[1].metadata, *hits.metadata[0]):
        one["k"].append(99)
        one["d"]["n"] = 99
    for row in range(3):
        assert index[row].metadata == {"k": [row], "d": {"n": row}}, index[row].metadata
    again = index.search(normal(1, seed=1), 3)
    assert again.metadata is not None and again.ids is not None
    assert [one["d"]["n"] for one in again.metadata[0]] == again.ids[0], again.metadata


def check_entries(make: MakeStore) -> None:
    """Ids, texts, metadata and vectors come back as they were given."""
    metadata: list[object] = [{"n": [1, {"ü": None}]}, None, [], "text", -(1 << 62), 1e-300, False]
    texts = ["one\nline", None, "", "ü🌷", "nul \0", "'; DROP TABLE entries; --", " "]
    ids: list[str | int] = ["a", "1", 1, -5, "ü🌷", "", 1 << 62]
    vectors = normal(7) * 10.0 ** torch.arange(-9, 12, 3)[:, None]
    index = filled(make, "cosine", vectors, metadata, ids=ids, texts=texts)
    assert index.ids == tuple(ids) and len(index) == 7 and 1 in index and "1" in index and 2 not in index
    for row, name in enumerate(ids):
        entry = index[name]
        given = (name, texts[row], metadata[row])
        assert entry[:3] == given and type(entry.metadata) is type(given[2]), f"gave {given}, got {entry[:3]}"
        assert torch.equal(entry.vector, vectors[row]), f"the vector of {name!r} was changed"
    some = index.store.get(["ü🌷", "nobody", "a", 1, "a"])
    assert some.ids == ("a", 1, "ü🌷"), f"get is of the known ids, each once, in the order of adding; got {some.ids}"
    assert len(index.store.get([])) == 0


def check_order(make: MakeStore) -> None:
    """Ids are in the order of adding, one that is added again last; numbers that name entries are not given twice."""
    index = filled(make, "ip", normal(5), ids=["a", "b", "c", "d", "e"])
    index.delete(["b", "e"])
    index.update(["d", "a"], normal(2, seed=1))
    index.add(normal(3, seed=2), ids=["e", "f", "b"])
    assert index.ids == ("a", "c", "d", "e", "f", "b"), index.ids
    index.update(index.ids, torch.ones(6, WIDTH))
    assert ids_of(index, torch.ones(1, WIDTH), 6) == [list(index.ids)], "equal scores are in the order of adding"
    numbered = filled(make, "ip", normal(3))
    numbered.delete([2])
    assert numbered.add(normal(2)) == (3, 4)
    numbered.delete(numbered.ids)
    assert len(numbered) == 0 and numbered.add(normal(1)) == (5,) and numbered.ids == (5,)


def check_updates(make: MakeStore) -> None:
    """An update replaces what is given, a deletion removes it: old vectors find the entry no more."""
    axes = torch.eye(WIDTH)
    index = filled(make, "cosine", axes[:5], [{"n": row} for row in range(5)], texts=list("abcde"))
    index.update([1, 3], axes[[7, 8]], metadata=[{"n": 10}, {"n": 30}])
    assert ids_of(index, axes[[7, 8]], 1) == [[1], [3]] and ids_of(index, axes[[1]], 5)[0] == [0, 1, 2, 3, 4]
    assert index[1][:3] == (1, "b", {"n": 10}) and index[0][:3] == (0, "a", {"n": 0})
    assert ids_of(index, axes[[7]], 2, {"n": 10}) == [[1, None]] and ids_of(index, axes[[7]], 1, {"n": 1}) == [[None]]
    index.update([1], texts=["z"])
    assert index[1][:3] == (1, "z", {"n": 10}) and torch.equal(index[1].vector, axes[7])
    index.delete([0, 4])
    assert 0 not in index and sorted(ids_of(index, axes[[0]], 3)[0]) == [1, 2, 3]


def check_tokens(make: MakeStore) -> None:
    """Encoded tokens come back with their entries where the store says that it holds them, or else are refused."""
    tokens = Memory.pad([normal(length)[:, :7] for length in (2, 1, 3)])
    if not make(WIDTH, "ip").holds_tokens:
        return refuses(ConfigError, lambda: filled(make, "ip", normal(3), tokens=tokens), "tokens for this store")
    index = filled(make, "ip", normal(3), tokens=tokens)
    index.update([1], normal(1, seed=1), tokens=Memory(torch.ones(1, 5, 7)))
    lengths = [len(part) for name in index.ids if (part := index[name].tokens) is not None]
    assert lengths == [2, 5, 3] and index.search(normal(1), 2).memory(tokens=True).dim == 7


def check_candidates_stay(make: MakeStore) -> None:
    """Candidates stay as they were, whatever happens to the store or to the tensors that were added."""
    store, vectors = make(WIDTH, "ip"), normal(7)
    copied = vectors.clone()
    index = Index(store)
    index.add(copied, metadata=[{"n": row} for row in range(7)])
    copied.zero_()
    result = candidates_of(store, normal(2, seed=1), 7, None)
    ids, metadata = result.entries.ids, result.entries.metadata
    index.update([0, 1], torch.ones(2, WIDTH), metadata=[None, None])
    index.delete([2, 3])
    assert (result.entries.ids, result.entries.metadata) == (ids, metadata)
    assert torch.equal(result.entries.vectors, vectors[list(ids)])


def check_saved(make: MakeStore) -> None:
    """A saved index is loaded, an empty one too: entries, order and `about`; later changes do not reach the files."""
    with tempfile.TemporaryDirectory() as folder:
        filled(make, "l2", torch.empty(0, WIDTH)).save(folder)
        empty = Index.load(folder)
        assert (len(empty), empty.dim, empty.metric) == (0, WIDTH, "l2")
        empty.close()
    for metric in METRICS:
        index = filled(make, metric, normal(1201), [{"n": row % 5} for row in range(1201)], texts=["ü"] * 1201)
        index.delete([3, 1200])
        index.update([7], normal(1, seed=1))
        index.add(normal(1, seed=2), ids=["ü🌷"], metadata=[{"n": 2}])
        index.store.about = {**index.store.about, "encoder": "abc"}
        with tempfile.TemporaryDirectory() as folder:
            index.save(folder)
            for mapped in (False, True):
                again = Index.load(folder, mapped=mapped)
                assert hasattr(index.store, "schemes") or again.store.settings == index.store.settings
                assert again.store.about == index.store.about, "about is not what was saved"
                same(index, again, metric)
                again.delete([0])
                assert again.add(normal(1)) == (1201,)
                again.close()
            same(index, again := Index.load(folder), metric)
            shutil.rmtree(os.path.join(folder, "v1"))
            same(index, again, metric)
        again.close()


def check_threads(make: MakeStore) -> None:
    """Threads search while another adds, updates and deletes: none fails, and every hit is an entry as it was given."""
    index = filled(make, "ip", torch.ones(31, WIDTH), [1] * 31)
    wrong: list[BaseException] = []
    done = threading.Event()

    def search() -> None:
        try:
            while not done.is_set():
                hits = index.search(torch.ones(2, WIDTH), 50)
                assert hits.metadata is not None and hits.vectors is not None
                for values, vectors, real in zip(hits.metadata, hits.vectors, hits.mask, strict=True):
                    numbers = torch.tensor([float(value) for value in values if value is not None])
                    assert len(numbers) == int(real.sum()), "an entry without its metadata was found"
                    assert torch.equal(vectors[real][:, 0], numbers), "the vector of another entry was found"
        except BaseException as error:
            wrong.append(error)

    searchers = [threading.Thread(target=search) for _ in range(3)]
    for searcher in searchers:
        searcher.start()
    try:
        for step in range(2, 22):
            index.add(torch.full((3, WIDTH), float(step)), metadata=[step] * 3)
            names = index.ids
            index.update(names[:7], torch.full((7, WIDTH), step + 0.5), metadata=[step + 0.5] * 7)
            index.delete(names[7:10])
    finally:
        done.set()
        for searcher in searchers:
            searcher.join()
    assert not wrong, f"{type(wrong[0]).__name__}: {wrong[0]}"
    assert len(index) == 31, f"31 entries should be left, and there are {len(index)}"
