"""What the checks of stores share: small stores with entries in them, searches looked at closely, the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.retrieval.entries import Entries, Filter
from mmattn.retrieval.index import Index
from mmattn.retrieval.scoring import score
from mmattn.retrieval.stores.base import Candidates, VectorStore

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
    """What the store itself proposes, after a look at its form."""
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
