"""Searched memories given to adapters whose keys are plain projections: attention itself finds what it attends to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.prepared_memory import PreparedMemory, ProjectedMemory
from mmattn.adapters.protocols import MemorySource
from mmattn.adapters.text_state import TextState
from mmattn.core.top_k_attention import SearchedSlots
from mmattn.errors import ConditionError, ShapeError
from mmattn.memory import Memory, SearchedEntries, SearchedMemory


class FoundView:
    """What the tokens of one forward find.

    Args:
        adapter: the trainable part that reads it.
        entries: as they were when the call began.
        per_query: how many of them each token sees, in each layer and head.
    """

    def __init__(self, adapter: AdapterLayers, entries: SearchedEntries, per_query: int) -> None:
        self.adapter, self.entries, self.per_query = adapter, entries, per_query

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """What a block gives for x, in a host layer."""
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
        asked = queries.float() * projection.scale
        if norm is not None:
            asked = asked * norm.weight.float()
        if self.adapter.score_bias:
            weight = float(projection.score_scale) / projection.score_std
        return self.entries.search(asked, self.per_query, weight).to(queries.device)

    def _read(self, rows: Tensor) -> Tensor:
        return self.adapter.read(Memory(self.entries.slots(rows)[None], check_finite=False)).tokens[0]

    def _scores(self, rows: Tensor) -> Tensor:
        return self.entries.scores(rows).to(rows.device)


class FoundMemory:
    """A searched memory bound to the adapter that reads it; the whole call sees the entries of one moment.

    Args:
        memory: as it was given.
        adapter: the trainable part that reads it.
    """

    follows_text = False

    def __init__(self, memory: SearchedMemory, adapter: AdapterLayers) -> None:
        norm = adapter.slot_norm()
        self.adapter, self.per_query, self.rows = adapter, memory.per_query, memory.rows
        self.entries = memory.entries(None if norm is None else norm.eps, adapter.score_bias)

    def step(self, text: TextState) -> FoundView:
        """What this forward sees.

        Raises:
            ShapeError: the rows of the text are not those that there are scores for.
            ConditionError: slots that arrive while the text is read, or a graph being traced.
        """
        text.check_rows(self.rows, self.adapter.name)
        if text.arrivals is not None:
            raise ConditionError("arrived= counts the slots of a memory in order, and an index has none: leave it out")
        if torch.compiler.is_compiling():
            raise ConditionError("an index is searched outside of a compiled graph: call the host as it is")
        return FoundView(self.adapter, self.entries, self.per_query)

    def as_memory(self, text: TextState) -> Memory:
        """All entries, for each row of the text."""
        memory = self.entries.memory().expand(text.rows if self.rows is None else self.rows)
        if not self.adapter.score_bias:
            return memory
        scores = self.entries.scores(torch.arange(memory.length))
        return Memory(memory.tokens, scores=scores, sources=memory.sources, check_finite=False)


def prepare(adapter: AdapterLayers, memory: SearchedMemory) -> SearchedMemory:
    """A searched memory, checked.

    Args:
        adapter: the trainable part that reads it.
        memory: as it was given.

    Raises:
        ShapeError: another width than that of the adapter, or it has no scores and the adapter needs them.
        ConditionError: an adapter whose keys are no plain projections of single slots.
    """
    adapter.slot_norm()
    if memory.dim != adapter.config.memory_dim:
        adapter.check_memory(Memory(torch.zeros(1, 1, memory.dim), check_finite=False))
    if not all(adapter.attention(layer).kv_proj.is_linear for layer in adapter.layers):
        raise ConditionError(
            f"the keys of adapter {adapter.name!r} are normalised or rotated (qk_norm), so no search in the space of "
            "the entries finds the largest: give hits.memory() of a search, or train without qk_norm"
        )
    if adapter.score_bias and memory.rows is None:
        raise ShapeError(
            f"adapter {adapter.name!r} was made with score_bias=True and weighs entries by how well they fit a query: "
            "give one for each row of text, index.as_memory(queries=...)"
        )
    return memory


def bind(adapter: AdapterLayers, memory: SearchedMemory, host: nn.Module) -> MemorySource:
    """The source of one call.

    Args:
        adapter: the trainable part that reads it.
        memory: as `prepare` returned it.
        host: the frozen model.

    Raises:
        ConditionError: an adapter whose tokens see a part of their memory only.
    """
    nothing = torch.zeros(1, 1, memory.dim)
    scores = torch.zeros(1, 1) if adapter.score_bias else None
    source = adapter.bind(PreparedMemory(Memory(nothing, scores=scores, check_finite=False)), host)
    if not isinstance(source, ProjectedMemory) or source.visibility is not None:
        raise ConditionError(
            f"the tokens of adapter {adapter.name!r} see some segments only, and an index has none: give a Memory"
        )
    return FoundMemory(memory, adapter)
