"""The memory of entries gathered from a bank, whose keys and values are read from the pages of the bank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.prepared_memory import PreparedMemory
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tensor_cache import TensorVersion
from mmattn.memory import Memory

# From an adapter, the number of a host layer and scores to keys and values; None where the pages are out of date.
Pages = Callable[[Any, int, Tensor | None], KeyValue | None]


class GatheredMemory(PreparedMemory):
    """Entries of a bank as one prepared memory; keys and values are those of their pages while these are up to date.

    Args:
        memory: (b, n·m, e), the entries.
        count: n, entries of each row.
        pages: gives keys and values from the pages of these entries.
    """

    def __init__(self, memory: Memory, count: int, pages: Pages) -> None:
        super().__init__(memory)
        self._count, self._pages = count, pages
        self._unedited = TensorVersion(memory.tensors())

    def read(self, adapter: Any) -> Memory:
        """The slots as an adapter reads them: without vectors where keys and values come from the pages.

        Args:
            adapter: the trainable part that reads.
        """
        projected = self._from_pages(adapter, adapter.layers[0])
        if projected is None:
            return super().read(adapter)
        slots: Memory = self.cache_of(adapter).get(("slots", projected.keys.device), [], lambda: self._slots(projected))
        return slots

    def project(self, adapter: Any, layer: int, memory: Memory, queries: int) -> KeyValue:
        """Keys and values from the pages of these entries, or else as of any prepared memory.

        Args:
            adapter: the trainable part that reads.
            layer: number of the host's layer.
            memory: what `read` returned.
            queries: how many attend to each row of the memory.
        """
        pages = self._from_pages(adapter, layer)
        if pages is not None:
            return pages
        # An entry may have been written after `read` had read the pages of the first layer.
        return super().project(adapter, layer, memory if memory.dim else super().read(adapter), queries)

    def _from_pages(self, adapter: Any, layer: int) -> KeyValue | None:
        """Keys and values of these entries from their pages; None where these are out of date."""
        if self.is_uncached(adapter):
            return None
        attention = adapter.attention(layer)
        sources = [*self.memory.tensors(), *adapter.reading_parameters(), *attention.projecting_parameters()]

        def gather() -> KeyValue | None:
            if not self._unedited.holds(self.memory.tensors()):
                return None
            return self._pages(adapter, layer, self.memory.scores if adapter.score_bias else None)

        projected: KeyValue | None = self.cache_of(adapter).get(("pages", layer), sources, gather)
        return projected

    def _slots(self, projected: KeyValue) -> Memory:
        """The mask and segments of the slots of keys and values, with vectors of width 0."""
        (b, n), m, device = (projected.batch, self._count), projected.slots, projected.keys.device
        segments = torch.arange(n, device=device).repeat_interleave(m // max(n, 1)).expand(b, -1)
        return Memory(projected.keys.new_empty(b, m, 0), projected.mask, segments, check_finite=False)
