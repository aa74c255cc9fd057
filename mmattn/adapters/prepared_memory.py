"""A memory given as vectors: normalised and resampled once, its keys and values projected once, for many calls."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmattn.adapters.compiled_kv import GraphInputs
from mmattn.adapters.text_state import TextState
from mmattn.core.attention import all_finite, combine_masks, visible_rows
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tensor_cache import ModuleVersion, TensorCache, TensorVersion, autocast_dtype
from mmattn.core.tracing import readable
from mmattn.errors import ConditionError, NonFiniteError
from mmattn.memory import Memory

# Cached keys and values decode faster at every size measured, but the memory itself is stored once for all layers:
# above this many bytes of K and V per adapter it is cached instead ("absorbed").
ABSORB_ABOVE = 1 << 30
# Queries per memory row from which an absorbed memory is projected for the occasion.
ABSORB_BELOW = 32


class Reader(Protocol):
    """What is asked of the trainable part of an adapter that projects a memory."""

    name: str
    layers: tuple[int, ...]
    score_bias: bool

    @property
    def weight(self) -> Tensor:
        """A weight on the device and in the dtype in which a memory is read."""

    def read(self, memory: Memory) -> Memory:
        """The memory as every block sees it."""

    def reading_parameters(self) -> Iterator[nn.Parameter]:
        """The weights that `read` uses."""

    def projecting_modules(self) -> Iterator[nn.Module]:
        """The parts on which keys and values depend, and those that hold them."""

    def kv_projection(self, layer: int) -> Any:
        """What projects the memory for a host layer."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""


@dataclass(frozen=True)
class CacheEntry:
    """What one adapter computed of a memory, by host layer, and under None the memory as the adapter reads it."""

    adapter: weakref.ref[Any]
    cache: TensorCache = field(default_factory=TensorCache)


class PreparedMemory:
    """A memory with what the adapters of a host computed of it, used by many calls; what `model.prepare` returns.

    Keys and values are projected at their first use, cached only while no gradients are needed, and projected again
    when the memory or a weight was changed.

    Args:
        memory: the memory; it stays as it is.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._entries: dict[tuple[str, torch.dtype | None], CacheEntry] = {}

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.memory.batch

    def project(self, adapter: Reader, layer: int, memory: Memory, queries: int) -> KeyValue:
        """Keys and values of the memory, as `read` gave it, for the block at a host layer.

        Args:
            adapter: the trainable part that reads.
            layer: number of the host's layer.
            memory: what `read` returned.
            queries: how many attend to each row of the memory.

        Raises:
            NonFiniteError: they overflow, though the memory is finite.
        """
        projection = adapter.kv_projection(layer)

        def project(absorb: bool = False, queries: int | None = None) -> KeyValue:
            projected = project_layer(adapter, layer, memory, absorb, queries)
            check_projected(adapter, layer, self.memory, projected)
            return projected

        if self.is_uncached(adapter):
            return project(queries=queries)
        size = 2 * memory.batch * memory.length * projection.num_kv_heads * projection.head_dim * len(adapter.layers)
        absorb = projection.absorbable and size * memory.tokens.element_size() > ABSORB_ABOVE
        if absorb and queries > ABSORB_BELOW:
            return project(queries=queries)
        # Absorbed, every layer reads the same tensor: computed once.
        shared = absorb and not (adapter.score_bias and memory.scores is not None)
        sources = [memory.tokens, *(() if shared else projection.projecting_parameters())]
        cached: KeyValue = self.cache_of(adapter).get(-1 if shared else layer, sources, lambda: project(absorb))
        return cached

    def read(self, adapter: Reader) -> Memory:
        """The memory as an adapter reads it."""
        if self.is_uncached(adapter):
            return adapter.read(self.memory)
        sources = [*self.memory.tensors(), *adapter.reading_parameters()]
        memory: Memory = self.cache_of(adapter).get(None, sources, lambda: adapter.read(self.memory))
        return memory

    def is_uncached(self, adapter: Reader) -> bool:
        """Nothing is cached while gradients are needed, nor inside a graph being traced."""
        if torch.compiler.is_compiling():
            return True
        return torch.is_grad_enabled() and (
            self.memory.tokens.requires_grad or any(parameter.requires_grad for parameter in adapter.parameters())
        )

    def cache_of(self, adapter: Reader) -> TensorCache:
        """What this adapter has computed of the memory, in the dtype of the autocast that is on."""
        key = adapter.name, autocast_dtype(adapter.weight.device)
        entry = self._entries.get(key)
        # Another host may have an adapter of this name.
        if entry is None or entry.adapter() is not adapter:
            entry = self._entries[key] = CacheEntry(weakref.ref(adapter))
        return entry.cache

    def nbytes(self) -> int:
        """Bytes of cached keys and values."""
        return sum(entry.cache.nbytes() for entry in self._entries.values())


def project_layer(
    adapter: Reader, layer: int, memory: Memory, absorb: bool = False, queries: int | None = None
) -> KeyValue:
    """Keys and values of a memory for the block at a host layer.

    Args:
        adapter: the trainable part that reads.
        layer: number of the host's layer.
        memory: what `read` returned.
        absorb: as in `CrossAttention.project`.
        queries: as in `CrossAttention.project`.
    """
    projection = adapter.kv_projection(layer)
    tokens = memory.tokens.to(projection.projecting_parameters()[0].device)
    scores = memory.scores if adapter.score_bias else None
    projected: KeyValue = projection.project(tokens, mask=memory.mask, scores=scores, absorb=absorb, queries=queries)
    return projected


def check_projected(adapter: Reader, layer: int, memory: Memory, projected: KeyValue) -> None:
    """Refuse a memory of which keys, values or biases are not finite, as the values of the memory itself are.

    A cast to half precision, a norm or a product loses what is finite on arrival; NaN in one row would reach others by
    masked attention, in which 0 · NaN is NaN.

    Args:
        adapter: the trainable part that reads.
        layer: number of the host's layer.
        memory: as it was given.
        projected: what was computed of it.

    Raises:
        NonFiniteError: they are not; the message names the rows.
    """

    def project_row(row: Memory) -> list[Tensor]:
        return project_layer(adapter, layer, adapter.read(row)).unchecked()

    check_read(adapter, memory, projected.unchecked(), project_row)


def check_read(
    adapter: Reader, memory: Memory, read: Sequence[Tensor], read_row: Callable[[Memory], Sequence[Tensor]]
) -> None:
    """Refuse a memory of which an adapter computes something that is not finite.

    Args:
        adapter: the trainable part that reads.
        memory: as it was given; one that need not be finite is not refused.
        read: what was computed.
        read_row: computes the same of one row.

    Raises:
        NonFiniteError: there is something; the message names the rows.
    """
    if not (read and memory.finite_checked and all(map(readable, read))) or all_finite(*read):
        return
    with torch.no_grad():
        rows = [row for row in range(memory.batch) if not all(map(_is_finite, read_row(memory[row])))]
    if rows:
        if not all(map(_is_finite, adapter.parameters())):
            raise NonFiniteError(
                f"weights of adapter {adapter.name!r} are not finite: load others, or train with a lower learning rate"
            )
        weight = adapter.weight
        dtype = autocast_dtype(weight.device) or weight.dtype
        which = f"row {', '.join(map(str, rows))} of the memory of adapter {adapter.name!r}"
        largest = float(_largest(memory[rows[0]]))
        if not math.isfinite(largest):
            raise NonFiniteError(f"{which} is not finite: repair its vectors, or mask such slots out")
        raise NonFiniteError(
            f"{which} overflows in {str(dtype).removeprefix('torch.')} (values up to {largest:.3g}): scale its "
            "vectors, or use a wider dtype"
        )


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _largest(memory: Memory) -> Tensor:
    """The largest absolute value of the slots that may be attended to."""
    return memory.tokens.detach().abs().masked_fill(~memory.real_slots()[..., None], 0).max()


class ProjectedView:
    """A memory in one forward: its keys and values, and who sees what.

    Args:
        projected: keys and values by host layer.
        attention_mask: (b, 1, l, m) bool, which slots each token sees; None for all that are real.
        seen: (b, l or 1, 1) bool, which tokens see anything; None where all do.
    """

    def __init__(self, projected: dict[int, KeyValue], attention_mask: Tensor | None, seen: Tensor | None) -> None:
        self.projected, self.attention_mask, self.seen = projected, attention_mask, seen

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """What a block gives for x, in a host layer."""
        out: Tensor = block(
            x,
            self.projected[layer],
            attention_mask=self.attention_mask,
            seen=self.seen,
            adapter_scale=adapter_scale,
        )
        return out


Visibility = Callable[[TextState, Memory], Tensor]


class CachedView:
    """What a forward saw, and all that it depends on.

    Args:
        view: what it saw.
        parts: of the adapter.
        sources: the tensors, its weights and those of the memory.
    """

    def __init__(self, view: ProjectedView, parts: ModuleVersion, sources: list[Tensor]) -> None:
        self.view, self._parts, self._sources = view, parts, sources
        self._version = TensorVersion(sources)

    def holds(self) -> bool:
        """Whether a forward would see the same now."""
        return self._parts.holds() and self._version.holds(self._sources)


class ProjectedMemory:
    """A prepared memory bound to the adapter that reads it.

    Args:
        prepared: the memory.
        adapter: the trainable part that reads it.
        visibility: gives the attention mask (b, 1, l, m) of a forward; None where every token sees every slot.
    """

    view = ProjectedView

    def __init__(self, prepared: PreparedMemory, adapter: Reader, visibility: Visibility | None = None) -> None:
        self.prepared, self.adapter, self.visibility = prepared, adapter, visibility
        self.rows: int | None = prepared.batch
        self.follows_text = visibility is not None
        # By rows and dtype of autocast.
        self._views: dict[Any, CachedView] = {}
        self._device = adapter.weight.device
        self._graph: GraphInputs | None = None
        self._graph_version = TensorVersion([])
        self._read_by_graph = False

    def step(self, text: TextState) -> ProjectedView:
        """What this forward sees; the same for each token that is written, until a tensor that it depends on changes.

        Raises:
            ShapeError: the rows of the text are not those of the memory.
        """
        prepared, adapter = self.prepared, self.adapter
        text.check_rows(self.rows, adapter.name)
        depends = self.visibility is not None or text.arrivals is not None or text.layer is not None
        many = text.rows // max(prepared.batch, 1) * text.length > ABSORB_BELOW
        if depends or many or prepared.is_uncached(adapter):
            return self.see(text)
        key = text.rows, autocast_dtype(self._device)
        cached = self._views.get(key)
        if cached is None or not cached.holds():
            self._device = adapter.weight.device
            parts = ModuleVersion(adapter.projecting_modules())
            cached = self._views[key] = CachedView(self.see(text), parts, self._sources())
        return cached.view

    def see(self, text: TextState) -> ProjectedView:
        """What this forward sees, computed now."""
        prepared, adapter = self.prepared, self.adapter
        layers = adapter.layers if text.layer is None else (text.layer,)
        graph = self._graph if torch.compiler.is_compiling() and not self._may_not_cache() else None
        if graph is not None:
            memory = graph.memory
            self._read_by_graph = True
        else:
            memory = prepared.read(adapter)
        rule = None if self.visibility is None else self.visibility(text, memory)
        arrived = text.arrived_slots(memory.length)
        if arrived is not None:
            arrived = arrived.to(memory.device)
            rule = arrived if rule is None else rule & arrived
        sizes = (text.rows, memory.batch, 1, text.length, memory.length)
        allowed = combine_masks(memory.mask, rule, sizes)
        seen = visible_rows(allowed, text.rows, memory.length, device=memory.device)
        if graph is not None:
            projected = graph.project(layers)
        else:
            queries = text.rows // max(memory.batch, 1) * text.length
            projected = {layer: prepared.project(adapter, layer, memory, queries) for layer in layers}
        return self.view(projected, rule, seen)

    def _may_not_cache(self) -> bool:
        return torch.is_grad_enabled() or torch.is_autocast_enabled(self._device.type)

    def prepare_graph(self) -> None:
        """Compute what a compiled host is to be given, where that may be cached.

        Raises:
            ConditionError: as in `check_graph`, of what it was given before.
        """
        prepared, adapter = self.prepared, self.adapter
        if torch.compiler.is_compiling() or self._may_not_cache():
            return
        self.check_graph()
        memory = prepared.read(adapter)
        self._graph = GraphInputs.of(
            memory, {layer: prepared.project(adapter, layer, memory, 1) for layer in adapter.layers}
        )
        self._graph_version = TensorVersion(self._sources())

    def check_graph(self) -> None:
        """Refuse answers of a compiled host for which the weights or the memory were edited too late.

        Raises:
            ConditionError: they were, since the call was begun.
        """
        if self._read_by_graph and not self._graph_version.holds(self._sources()):
            raise ConditionError(
                f"the weights of adapter {self.adapter.name!r} or its memory were changed inside a condition block, "
                "and a compiled host went on with keys and values from before: begin a new block after each change"
            )

    def _sources(self) -> list[Tensor]:
        sources = [*self.prepared.memory.tensors(), *self.adapter.reading_parameters()]
        for layer in self.adapter.layers:
            sources += self.adapter.kv_projection(layer).projecting_parameters()
        return sources

    def as_memory(self, text: TextState) -> Memory:
        """The memory itself."""
        return self.prepared.memory.detach()
