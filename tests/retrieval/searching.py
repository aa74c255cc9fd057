"""What the tests of retrieval share: the slow definition of a search, and small indexes of every store."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmattn import Index, Memory

METRICS = ("cosine", "ip", "l2")
#: Every store in memory, the approximate ones so thorough that they miss nothing in a thousand entries.
STORES: dict[str, dict[str, Any]] = {
    "exact": {},
    "hnsw": {"links": 48, "build_effort": 400, "search_effort": 1500},
    "ivf": {"lists": 11, "visited": 11},
    "ivfpq": {"lists": 11, "visited": 11},
}
#: Stores of both kinds: in memory, and in a database.
KINDS = ("exact", "qdrant")
WIDTH = 12


def fit(query: Sequence[float], vector: Sequence[float], metric: str) -> float:
    """How well two vectors fit: the definition, in exact sums, rounded to float32."""
    if metric == "l2":
        value = -math.fsum((x - q) ** 2 for q, x in zip(query, vector, strict=True))
    else:
        value = math.fsum(q * x for q, x in zip(query, vector, strict=True))
    if metric == "cosine":
        value /= math.sqrt(math.fsum(q * q for q in query)) * math.sqrt(math.fsum(x * x for x in vector))
    return float(np.float32(value))


def reference(
    queries: Any, vectors: dict[Any, Any], count: int, metric: str, fit: Callable[[Any, Any, str], float] = fit
) -> tuple[list[list[Any]], list[list[float]]]:
    """The ids and scores of a search by comparing everything; those of equal score in their order, the rest None."""
    ids, scores = [], []
    for query in queries.tolist() if isinstance(queries, torch.Tensor) else queries:
        fits = sorted(((fit(query, vector, metric), -row, name) for row, (name, vector) in enumerate(vectors.items())))
        top = fits[::-1][:count]
        ids.append([name for _, _, name in top] + [None] * (count - len(top)))
        scores.append([value for value, _, _ in top] + [-math.inf] * (count - len(top)))
    return ids, scores


class Letters:
    """A text encoder without weights: how often each of some letters occurs, and where."""

    def __init__(self, dim: int = 31, seed: int = 0) -> None:
        self.dim = dim
        self.seed = seed

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"letters {self.dim} {self.seed}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> Memory:
        tokens = torch.zeros(len(texts), 1, self.dim)
        for row, text in enumerate(texts):
            for place, letter in enumerate(text):
                tokens[row, 0, (ord(letter) + self.seed) % self.dim] += 1 + 0.01 * place
        return Memory(tokens)


def built(items: Any, store: str = "exact", **kwargs: Any) -> Any:
    """An index of a store, with the settings in `STORES`."""
    return Index.build(items, store=store, **STORES.get(store, {}), **kwargs)


def small(count: int = 1103, metric: str = "cosine", store: str = "exact", **kwargs: Any) -> Any:
    return built(torch.randn(count, WIDTH), store, metric=metric, **kwargs)


def held(index: Any) -> dict[Any, list[float]]:
    """The vectors of an index by id."""
    return {name: index[name].vector.tolist() for name in index.ids}


def same(a: Index, b: Index) -> None:
    """Assert that two indexes hold the same and find the same."""
    assert (a.ids, a.metric, a.dim) == (b.ids, b.metric, b.dim)
    for name in a.ids:
        x, y = a[name], b[name]
        assert x[:3] == y[:3] and torch.equal(x.vector, y.vector)
        assert (x.tokens is None) == (y.tokens is None)
        assert x.tokens is None or y.tokens is None or torch.equal(x.tokens, y.tokens)
    queries = torch.randn(3, a.dim)
    one, two = a.search(queries, 5), b.search(queries, 5)
    assert one.ids == two.ids and torch.equal(one.scores, two.scores)


def files(folder: Path) -> list[str]:
    """All files below a folder, by their paths in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
