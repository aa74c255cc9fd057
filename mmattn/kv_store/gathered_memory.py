"""The memory of entries that requests gather from a bank, with keys and values from the pages of the bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.projection import PreparedMemory, Reader
from mmattn.core.kv_cache import KeyValue
from mmattn.errors import ShapeError, check_bool_mask
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import TensorVersion, Values, cached

#: From an adapter, the number of a host layer and scores to keys and values; None if the weights have changed.
Pages = Callable[[AdapterLayers, int, Tensor | None], KeyValue | None]


class GatheredMemory(PreparedMemory):
    """A prepared memory of n entries per row, whose keys and values are those of their pages while these hold."""

    def __init__(self, memory: Memory, count: int, pages: Pages) -> None:
        super().__init__(memory)
        self._entries_per_row, self._pages = count, pages
        self._unedited = TensorVersion(memory.tensors())

    def read(self, adapter: Reader, values: Values | None) -> Memory:
        """Return the slots as an adapter reads them: without vectors if keys and values come from the pages."""
        projected = self._from_pages(adapter, adapter.layers[0], values)
        if projected is None or values is None:
            return super().read(adapter, values)
        return cached(values, ("slots", projected.keys.device), partial(self._slots, projected))

    def project(
        self, adapter: Reader, layers: Sequence[int], read: Memory, queries: int, values: Values | None
    ) -> dict[int, KeyValue]:
        """Return keys and values from the pages, or else as any prepared memory does."""
        pages = {layer: self._from_pages(adapter, layer, values) for layer in layers}
        projected = {layer: page for layer, page in pages.items() if page is not None}
        if missing := [layer for layer in layers if layer not in projected]:
            # An entry may have been written after `read` had read the pages of the first layer.
            vectors = read if read.dim else super().read(adapter, values)
            projected |= super().project(adapter, missing, vectors, queries, values)
        return projected

    def _from_pages(self, adapter: Reader, layer: int, values: Values | None) -> KeyValue | None:
        if values is None or not isinstance(adapter, AdapterLayers):
            return None

        def gather() -> KeyValue | None:
            if not self._unedited.holds(self.memory.tensors()):
                return None
            return self._pages(adapter, layer, self.memory.scores if adapter.score_bias else None)

        return cached(values, ("pages", layer), gather)

    def _slots(self, projected: KeyValue) -> Memory:
        """Return the mask and segments of the slots of keys and values, with vectors of width 0."""
        b, n, m, device = projected.batch, self._entries_per_row, projected.slots, projected.keys.device
        segments = torch.arange(n, device=device).repeat_interleave(m // max(n, 1)).expand(b, -1)
        return Memory(projected.keys.new_empty(b, m, 0), projected.mask, segments, check_finite=False)


def is_int(tensor: Tensor) -> bool:
    """Return True for a tensor of an integer dtype."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_hits(
    rows: Tensor, mask: Tensor | None, scores: Tensor | None, sources: Sequence[Sequence[object]] | None
) -> Tensor:
    """Return the hits (b, n) bool that are not missing; refuse arguments that do not fit the rows (b, n) int."""
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not is_int(rows):
        kind = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ShapeError(f"rows must be an int tensor (b, n), the entries of each request; got {kind}")
    b, n = rows.shape
    hits = torch.ones_like(rows, dtype=torch.bool) if mask is None else check_bool_mask("mask", mask)
    for what, shape in (("mask", hits.shape), ("scores", rows.shape if scores is None else scores.shape)):
        if shape != rows.shape:
            raise ShapeError(f"{what} must be (b, n) = {(b, n)} as the rows are, got {tuple(shape)}")
    if sources is not None and [len(row) for row in sources] != [n] * b:
        raise ShapeError(f"sources need one entry per hit, {b} rows of {n}; got {[len(row) for row in sources]}")
    return hits


def memory_of_hits(
    tokens: Tensor, mask: Tensor, hits: Tensor, scores: Tensor | None, sources: Sequence[Sequence[object]] | None
) -> Memory:
    """Return the slots (b, n, m, e) of the hits of each row as a memory (b, n·m, e); each hit is a segment."""
    b, n, m, _ = tokens.shape
    if scores is not None:
        # A missing hit's score may be anything.
        scores = torch.where(hits, scores.to(tokens.device), 0).repeat_interleave(m, 1)
    segments = torch.arange(n, device=tokens.device).repeat_interleave(m).expand(b, -1)
    repeated = None if sources is None else [[source for source in row for _ in range(m)] for row in sources]
    memory = Memory(tokens.flatten(1, 2), mask.flatten(1), segments, scores, repeated, check_finite=False)
    if scores is not None:
        Memory(tokens.new_empty(b, n * m, 0), scores=scores).check_finite()
    return memory
