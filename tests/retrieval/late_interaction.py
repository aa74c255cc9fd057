"""What the tests of late interaction share: the slow definition of MaxSim, and small indexes of ragged entries."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmattn import Memory
from mmattn.retrieval import MultiVectorIndex
from tests.retrieval import searching

METRICS = ("cosine", "ip")
WIDTH, ENTRIES = 13, 37
#: Slots of the entries, in turn: one of them has a single one.
LENGTHS = (5, 1, 7, 2, 11)


def maxsim(query: Tensor, entry: Tensor, metric: str) -> float:
    """Equation 3 of arXiv 2004.12832 by loops in float64, rounded to float32."""
    total = 0.0
    for q in query.double().tolist():
        best = -math.inf
        for d in entry.double().tolist():
            value = math.fsum(x * y for x, y in zip(q, d, strict=True))
            if metric == "cosine":
                value /= math.sqrt(math.fsum(x * x for x in q)) * math.sqrt(math.fsum(y * y for y in d))
            best = max(best, value)
        total += best
    return float(np.float32(total))


def reference(queries: list[Tensor], entries: dict[Any, Tensor], count: int, metric: str) -> tuple[list[Any], Tensor]:
    """The ids and scores of a search by comparing everything."""
    ids, scores = searching.reference(queries, entries, count, metric, maxsim)
    return ids, torch.tensor(scores)


def ragged(count: int = ENTRIES) -> list[Tensor]:
    """Entries (m, e) of different lengths."""
    return [torch.randn(LENGTHS[row % len(LENGTHS)], WIDTH) for row in range(count)]


def asked() -> list[Tensor]:
    """Three queries (l, e) of different lengths."""
    return [torch.randn(length, WIDTH) for length in (3, 1, 6)]


def held(index: MultiVectorIndex) -> dict[Any, Tensor]:
    """The vectors of an index by id."""
    return {name: index[name].tokens for name in index.ids}  # type: ignore[misc]


def agree(index: MultiVectorIndex, queries: list[Tensor], count: int, **options: Any) -> None:
    """Assert that a search finds what the definition finds."""
    hits = index.search(queries, count, **options)
    ids, scores = reference(queries, held(index), count, index.metric)
    assert hits.ids == ids
    torch.testing.assert_close(hits.scores, scores, rtol=2e-7, atol=1e-7)


class LetterStates:
    """An encoder without weights: a vector for each letter of a text, which depends on its neighbours, too.

    Queries are encoded with an end of their own, as ColBERT marks them.
    """

    dim = WIDTH

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.table = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(seed))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"letter states {self.seed}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> Memory:
        return Memory.pad([self._states(text) for text in texts]) if texts else Memory(torch.zeros(0, 0, WIDTH))

    def encode_query(self, texts: list[str]) -> Memory:
        return Memory.pad([self._states(f"{text}?") for text in texts])

    def _states(self, text: str) -> Tensor:
        own = self.table[torch.tensor([ord(letter) for letter in text])]
        return own + 0.5 * own.roll(1, 0)
