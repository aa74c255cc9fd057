"""Memories in which attention itself searches many entries: the interface of an index to adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from mmattn.memory.memory import Memory


class SearchedEntries(Protocol):
    """The entries of a searched memory as they are at one moment, one slot each."""

    def __len__(self) -> int:
        """Return the number of entries n."""

    def search(self, queries: Tensor, count: int, score_weight: float | None = None) -> Tensor:
        """Return the rows (b, n, count or fewer) of the entries with the largest inner products; -1 is none.

        Queries are (b, n, e), in the space of the entries; `score_weight` times the scores is added to the products.
        """

    def slots(self, rows: Tensor) -> Tensor:
        """Return the vectors (n, e) of rows (n,)."""

    def scores(self, rows: Tensor) -> Tensor:
        """Return the scores (b, n) that entries of rows (n,) have for the query of each row of text."""

    def memory(self) -> Memory:
        """Return all entries as a memory."""


class SearchedMemory(ABC):
    """A memory of many entries, of which every token attends, in each layer and head, to those that fit it best.

    Attributes:
        dim: e, width of the entries.
        rows: rows of text that it has scores for; None without scores, where it fits any text.
        per_query: how many entries each token sees, in each layer and head.
    """

    dim: int
    rows: int | None
    per_query: int

    @abstractmethod
    def entries(self, eps: float | None, scored: bool = False) -> SearchedEntries:
        """Return the entries as they are now.

        Args:
            eps: ε of the LayerNorm with which an adapter normalises slots before the search; None for no norm.
            scored: searches weigh scores, too.
        """
