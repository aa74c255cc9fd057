"""Threads that search while one writes: every hit belongs to one committed version."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mmattn import Index
from tests.retrieval.searching import STORES, WIDTH


@pytest.mark.parametrize("store", STORES)
def test_four_searchers_and_a_writer(store: str) -> None:
    """Invariant 81: version v holds entries named by v whose vectors, texts and metadata say v; more or fewer of them
    each time.
    """

    def contents(version: int) -> dict[str, object]:
        count = 1031 + 7 * (version % 3)
        return {
            "items": torch.eye(WIDTH)[torch.arange(count) % WIDTH] * (version + 1),
            "texts": [f"{version}"] * count,
            "metadata": [{"version": version}] * count,
        }

    index = Index.build(metric="ip", store=store, **STORES[store], **contents(0))  # type: ignore[arg-type]
    states, wrong, searches, done = {0: index.store.version}, [], [], threading.Event()

    def search() -> None:
        while not done.is_set():
            try:
                hits = index.search(torch.eye(WIDTH)[:3], 5)
                assert hits.metadata is not None and hits.texts is not None and hits.vectors is not None
                versions = {value["version"] for row in hits.metadata for value in row}
                (version,) = versions
                assert hits.mask.all() and {text for row in hits.texts for text in row} == {f"{version}"}
                assert (hits.vectors.sum(-1) == version + 1).all() and (hits.scores == version + 1).all()
                searches.append(version)
            except Exception as error:
                wrong.append(error)

    searchers = [threading.Thread(target=search) for _ in range(4)]
    for searcher in searchers:
        searcher.start()
    end, version = time.monotonic() + 2, 0
    while time.monotonic() < end or (len(set(searches)) < 3 and time.monotonic() < end + 60 and not wrong):
        version += 1
        new = contents(version)
        count, extra = len(index), len(new["texts"]) - len(index)  # type: ignore[arg-type]
        if extra < 0:
            index.delete(index.ids[extra:])
            index.update(index.ids, **{name: values[:count] for name, values in new.items()})  # type: ignore[index]
        elif extra == 0:
            index.update(index.ids, **new)  # type: ignore[arg-type]
        else:
            index.update(index.ids, **{name: values[:count] for name, values in new.items()})  # type: ignore[index]
            index.add(**{name: values[count:] for name, values in new.items()})  # type: ignore[index]
        states[version] = index.store.version
    done.set()
    for searcher in searchers:
        searcher.join()
    assert not wrong, wrong[:3]
    assert len(set(searches)) >= 3 and len({id(state) for state in states.values()}) == version + 1


def test_writers_in_threads_lose_nothing() -> None:
    index = Index.build(torch.empty(0, WIDTH))

    def write(name: int) -> None:
        for step in range(20):
            index.add(
                torch.ones(3, WIDTH) * (name + 1), metadata=[name] * 3, ids=[f"{name} {step} {i}" for i in range(3)]
            )
            given = index.add(torch.ones(2, WIDTH))
            index.delete(given[:1])

    writers = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(index) == 4 * 20 * 4
    assert sum(isinstance(name, int) for name in index.ids) == 80
    assert {(int(index[n].vector[0]) - 1, index[n].metadata) for n in index.ids if isinstance(n, str)} == {
        (name, name) for name in range(4)
    }
