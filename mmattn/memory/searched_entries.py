"""Memories in which attention itself searches many entries: the interface of an index to adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


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
    def entries(self, eps: float | None, scored: bool = False) -> Any:
        """Return the entries as they are now, `mmattn.retrieval.attention_search.IndexEntries`.

        Args:
            eps: ε of the LayerNorm with which an adapter normalises slots before the search; None for no norm.
            scored: searches weigh scores, too.
        """
