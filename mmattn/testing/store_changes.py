"""Checks of stores: entries added, updated and deleted, saved and loaded, and searched meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from typing import Any

import torch

from mmattn.errors import ConfigError
from mmattn.memory import Memory
from mmattn.retrieval.index import Index
from mmattn.retrieval.scoring import METRICS
from mmattn.testing.store_searches import WIDTH, MakeStore, candidates_of, filled, ids_of, normal, same


def check_entries(make: MakeStore) -> None:
    """Ids, texts, metadata and vectors come back as they were given."""
    metadata: list[Any] = [{"n": [1, {"ü": None}]}, None, [], "text", -(1 << 62), 1e-300, False]
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
    """Ids are in the order of adding; one that is deleted and added again is the last, and updates move none."""
    index = filled(make, "ip", normal(5), ids=["a", "b", "c", "d", "e"])
    index.delete(["b", "e"])
    index.update(["d", "a"], normal(2, seed=1))
    index.add(normal(3, seed=2), ids=["e", "f", "b"])
    assert index.ids == ("a", "c", "d", "e", "f", "b"), index.ids
    index.update(index.ids, torch.ones(6, WIDTH))
    assert ids_of(index, torch.ones(1, WIDTH), 6) == [list(index.ids)], "equal scores are in the order of adding"


def check_numbers(make: MakeStore) -> None:
    """Numbers that name entries are counted on, and never given twice."""
    index = filled(make, "ip", normal(3))
    index.delete([2])
    assert index.add(normal(2)) == (3, 4)
    index.delete(index.ids)
    assert len(index) == 0 and not index.search(normal(1), 3).mask.any()
    assert index.add(normal(1)) == (5,) and index.ids == (5,)


def check_updates(make: MakeStore) -> None:
    """An update replaces what is given: the old vector finds the entry no more, the new one does."""
    eye = torch.eye(WIDTH)
    index = filled(make, "cosine", eye[:5], [{"n": row} for row in range(5)], texts=list("abcde"))
    index.update([1, 3], eye[[7, 8]], metadata=[{"n": 10}, {"n": 30}])
    assert ids_of(index, eye[[7, 8]], 1) == [[1], [3]] and ids_of(index, eye[[1]], 5)[0] == [0, 1, 2, 3, 4]
    assert index[1][:3] == (1, "b", {"n": 10}) and index[0][:3] == (0, "a", {"n": 0})
    assert ids_of(index, eye[[7]], 2, {"n": 10}) == [[1, None]] and ids_of(index, eye[[7]], 1, {"n": 1}) == [[None]]
    index.update([1], texts=["z"])
    assert index[1][:3] == (1, "z", {"n": 10}) and torch.equal(index[1].vector, eye[7])


def check_deletes(make: MakeStore) -> None:
    """Deleted entries are gone: from searches, from the ids, from the count."""
    index = filled(make, "l2", normal(41))
    index.delete(range(0, 41, 2))
    assert index.ids == tuple(range(1, 41, 2)) and len(index) == 20 and 0 not in index
    (names,) = ids_of(index, normal(1, seed=1), 41)
    assert sorted(name for name in names if name is not None) == list(range(1, 41, 2)), names


def check_tokens(make: MakeStore) -> None:
    """Encoded tokens come back with their entries where the store says that it holds them, or else are refused."""
    tokens = Memory.pad([normal(length)[:, :7] for length in (2, 1, 3)])
    if not make(WIDTH, "ip").holds_tokens:
        try:
            filled(make, "ip", normal(3), tokens=tokens)
        except ConfigError:
            return
        raise AssertionError("tokens were given to a store that holds none, and were not refused")
    index = filled(make, "ip", normal(3), tokens=tokens)
    index.update([1], normal(1, seed=1), tokens=Memory(torch.ones(1, 5, 7)))
    lengths = [len(part) for name in index.ids if (part := index[name].tokens) is not None]
    assert lengths == [2, 5, 3] and index.search(normal(1), 2).memory(tokens=True).dim == 7


def check_candidates_stay(make: MakeStore) -> None:
    """Candidates stay as they were, whatever happens to the store or to the tensors that were added."""
    store, vectors = make(WIDTH, "ip"), normal(7)
    given = vectors.clone()
    index = Index(store)
    index.add(given, metadata=[{"n": row} for row in range(7)])
    given.zero_()
    found = candidates_of(store, normal(2, seed=1), 7, None)
    ids, metadata = found.entries.ids, found.entries.metadata
    index.update([0, 1], torch.ones(2, WIDTH), metadata=[None, None])
    index.delete([2, 3])
    assert (found.entries.ids, found.entries.metadata) == (ids, metadata)
    assert torch.equal(found.entries.vectors, vectors[list(ids)])


def check_saved(make: MakeStore) -> None:
    """A saved index is loaded: entries, order and `about`; later changes do not reach the files."""
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


def check_empty_saved(make: MakeStore) -> None:
    """An empty store is saved and loaded, too."""
    with tempfile.TemporaryDirectory() as folder:
        filled(make, "l2", torch.empty(0, WIDTH)).save(folder)
        index = Index.load(folder)
        assert (len(index), index.dim, index.metric) == (0, WIDTH, "l2")
        index.add(normal(3))
        assert ids_of(index, normal(3)[[1]], 1) == [[1]]
        index.close()


def check_close(make: MakeStore) -> None:
    """Closing a store twice does no more than closing it once."""
    store = make(WIDTH, "ip")
    store.close()
    store.close()


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
