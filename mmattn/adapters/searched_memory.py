"""A `SearchedMemory` given to adapters whose keys are plain projections: attention itself finds its slots."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers, register_memory_type
from mmattn.adapters.protocols import BoundMemory, Scale, View
from mmattn.adapters.text_state import TextState
from mmattn.core.top_k_attention import SearchedSlots
from mmattn.errors import ConditionError, ShapeError
from mmattn.memory import Memory, SearchedEntries, SearchedMemory


class SearchedView(View):
    """The entries that the tokens of one forward find, `per_query` for each token, layer and head."""

    def __init__(self, adapter: AdapterLayers, entries: SearchedEntries, per_query: int) -> None:
        self.adapter, self.entries, self.per_query = adapter, entries, per_query

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        projection = self.adapter.attention(layer).kv_proj
        slots = SearchedSlots(
            partial(self._search, projection),
            self._read,
            self._scores if self.adapter.score_bias else None,
            len(self.entries),
        )
        seen = None if len(self.entries) else torch.zeros(len(x), 1, 1, dtype=torch.bool, device=x.device)
        out: Tensor = block(x, slots, seen=seen, adapter_scale=adapter_scale)
        return out

    def _search(self, projection: Any, queries: Tensor) -> Tensor:
        norm, weight = self.adapter.slot_norm(), None
        scaled = queries.float() * projection.scale
        if norm is not None:
            scaled = scaled * norm.weight.float()
        if self.adapter.score_bias:
            weight = float(projection.score_scale) / projection.score_std
        return self.entries.search(scaled, self.per_query, weight).to(queries.device)

    def _read(self, rows: Tensor) -> Tensor:
        return self.adapter.read(Memory(self.entries.slots(rows)[None], check_finite=False)).tokens[0]

    def _scores(self, rows: Tensor) -> Tensor:
        return self.entries.scores(rows).to(rows.device)


class BoundSearch(BoundMemory):
    """A searched memory bound to the adapter that reads it; the whole call attends to the entries of one moment."""

    def __init__(self, memory: SearchedMemory, adapter: AdapterLayers) -> None:
        norm = adapter.slot_norm()
        self.adapter, self.per_query, self.rows = adapter, memory.per_query, memory.rows
        self.name, self.shared = adapter.name, memory
        self.entries = memory.entries(None if norm is None else norm.eps, adapter.score_bias)

    def step(self, text: TextState) -> SearchedView:
        self.check_rows(text)
        if torch.compiler.is_compiling():
            raise ConditionError("an index is searched outside of a compiled graph: call the host as it is")
        return SearchedView(self.adapter, self.entries, self.per_query)

    def as_memory(self, text: TextState) -> Memory:
        memory = self.entries.memory().expand(text.rows if self.rows is None else self.rows)
        if not self.adapter.score_bias:
            return memory
        scores = self.entries.scores(torch.arange(memory.length))
        return Memory(memory.tokens, scores=scores, sources=memory.sources, check_finite=False)


def bind_searched(memory: SearchedMemory, adapter: AdapterLayers, host: nn.Module) -> BoundSearch:
    """Bind a searched memory to an adapter."""
    adapter.check_parts("memory that is searched", "a Memory, such as hits.memory() of a search")
    adapter.slot_norm()
    if memory.dim != adapter.config.memory_dim:
        adapter.check_memory(Memory(torch.zeros(1, 1, memory.dim), check_finite=False))
    if not all(adapter.attention(layer).kv_proj.is_linear for layer in adapter.layers):
        raise ConditionError(
            f"the keys of adapter {adapter.name!r} are normalised or rotated (qk_norm), so no search finds the largest "
            "scores: give hits.memory() of a search, or train without qk_norm"
        )
    if adapter.score_bias and memory.rows is None:
        raise ShapeError(
            f"adapter {adapter.name!r} was made with score_bias=True and weighs entries by how well they fit a query: "
            "give one for each row of text, index.as_memory(queries=...)"
        )
    return BoundSearch(memory, adapter)


register_memory_type(SearchedMemory, bind_searched)
