"""What may be given as `memory=` where attention itself searches many entries: what an index offers to adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from mmattn.memory.memory import Memory


class SearchedEntries(Protocol):
    """The entries of a searched memory as they are at one moment, one slot each."""

    def __len__(self) -> int:
        """How many there are, n."""

    def search(self, queries: Tensor, count: int, score_weight: float | None = None) -> Tensor:
        """The rows (b, n, count or fewer) of the entries with the largest inner products, in any order; -1 is none.

        Args:
            queries: (b, n, e), in the space of the entries as they are searched.
            count: how many.
            score_weight: of the scores that are added to the inner products; None adds none.
        """

    def slots(self, rows: Tensor) -> Tensor:
        """The vectors (n, e) of rows (n,)."""

    def scores(self, rows: Tensor) -> Tensor:
        """The scores (b, n) that entries of rows (n,) have for the query of each row of text."""

    def memory(self) -> Memory:
        """All of them, as a memory."""


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
        """The entries as they are now.

        Args:
            eps: where an adapter normalises slots, the ε of its LayerNorm: the entries are searched as that leaves
                them, without its weights. None: as they are.
            scored: searches weigh scores, too.
        """
