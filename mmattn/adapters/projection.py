"""Vectors given as `memory=`: read and projected by an adapter, kept for many calls, and attended to in each forward.

`Reader` is the part of an adapter that reads, `PreparedMemory` keeps what it computed, `ProjectedMemory` is that memory
in one call, and `ProjectedView` what the tokens of one forward attend to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import BoundMemory, JoinRequests, KeepFinite, PackedView, Scale, View, check_one_row
from mmattn.adapters.resampler import PerceiverResampler
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import PackedText, TextState
from mmattn.core.attention_inputs import combine_masks, visible_rows, zero_hidden
from mmattn.core.key_values import KeyValue
from mmattn.core.tracing import refuse_unless_finite
from mmattn.errors import ConditionError, NonFiniteError
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import KeyValueCache, TensorVersion, Values, autocast_dtype, cached

_TENSORS = attrgetter("tokens", "mask", "segments", "scores")


class Reader(nn.Module):
    """The part of `AdapterLayers` that reads and projects a memory.

    Attributes:
        score_bias: the memory must have scores.
        follows_text: the slots that a token attends to depend on the text.
        changes_all: blocks also change tokens without a visible slot.
    """

    config: AdapterConfig
    name: str
    layers: tuple[int, ...]
    blocks: nn.ModuleDict
    score_bias = False
    follows_text = False
    changes_all = False

    def __init__(self) -> None:
        super().__init__()
        self.memory_norm: nn.LayerNorm | None = None
        self.resampler: PerceiverResampler | None = None

    @property
    def weight(self) -> Tensor:
        """Return a weight on the device and in the dtype in which a memory is read."""
        if self.memory_norm is not None:
            return self.memory_norm.weight
        # Gates, which stay in float32, are no matrices.
        return next(parameter for parameter in self.parameters() if parameter.dim() > 1)

    def block(self, layer: int) -> nn.Module:
        """Return the block at host layer `layer`."""
        return self.blocks[str(layer)]

    def attention(self, layer: int) -> nn.Module | None:
        """Return the module that attends to the memory at host layer `layer`, whose weights are recorded, or None."""
        return None

    def kv_projection(self, layer: int) -> Any:
        """Return the module that projects keys and values for host layer `layer`, such as a `KeyValueProjection`."""
        attention = self.attention(layer)
        return getattr(attention, "kv_proj", attention)

    def read(self, memory: Memory) -> Memory:
        """Return the memory as every block attends to it: normalised and resampled, as the settings have it."""
        tokens = self.cast(memory)
        read = memory.replace(tokens if self.memory_norm is None else self.memory_norm(tokens))
        return read if self.resampler is None else self.resampler(read)

    def cast(self, memory: Memory) -> Tensor:
        """Return the vectors of a memory on the device and in the dtype of the weights, padding set to 0."""
        weight = self.weight
        tokens = memory.tokens.to(weight.device)
        # Norms take narrower states than their weights under autocast, and never wider ones.
        if not torch.is_autocast_enabled(tokens.device.type) or tokens.element_size() > weight.element_size():
            tokens = tokens.to(weight.dtype)
        return tokens if memory.mask is None else zero_hidden(tokens, memory.mask.to(tokens.device)[..., None])

    def reading_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights that `read` uses: all outside the blocks."""
        yield from self.parameters(recurse=False)
        for name, part in self.named_children():
            if name != "blocks":
                yield from part.parameters()

    def visible_slots(self, text: TextState, memory: Memory) -> Tensor | None:
        """Return the slots that each token attends to, (b, 1, l, m) bool; None for all that are real."""
        return None


class PreparedMemory:
    """A memory with cached keys and values for many calls; the result of `model.prepare`.

    Keys and values are projected at their first use, cached if no gradients are needed, and projected again after a
    change of the memory or a weight.

    Args:
        memory: the memory; it is not changed.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.cache = KeyValueCache(partial(_TENSORS, memory))
        #: The adapters that can read it.
        self.checked_by: WeakSet[nn.Module] = WeakSet()

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.memory.batch

    def values(self, adapter: nn.Module) -> Values | None:
        """Return what is cached for an adapter, to be added to; None if gradients are needed or a graph is traced.

        What is added belongs to memory and weights as they are now: after an edit, others are returned.
        """
        if torch.compiler.is_compiling():
            return None
        if torch.is_grad_enabled() and (
            self.memory.tokens.requires_grad or any(one.requires_grad for one in adapter.parameters())
        ):
            return None
        return self.cache.values(adapter)

    def read(self, adapter: Reader, values: Values | None) -> Memory:
        """Return the memory as an adapter reads it, from or into the cached values."""
        if values is None:
            return adapter.read(self.memory)
        return cached(values, "read", partial(adapter.read, self.memory))

    def project(
        self, adapter: Reader, layers: Sequence[int], read: Memory, queries: int, values: Values | None
    ) -> dict[int, KeyValue]:
        """Return keys and values of the memory for the blocks at some host layers.

        Args:
            adapter: the trainable part that reads.
            layers: numbers of the host's layers.
            read: what `read` returned.
            queries: how many attend to each row of the memory, where nothing is cached.
            values: what is cached.

        Raises:
            NonFiniteError: they overflow, though the memory is finite.
        """
        if values is None:
            return check_projected(adapter, self.memory, project_layers(adapter, layers, read, queries))
        if missing := [layer for layer in layers if layer not in values]:
            # A cached value must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                projected = project_layers(adapter, missing, read)
            for layer, one in check_projected(adapter, self.memory, projected, values).items():
                values[layer] = one
        return {layer: values[layer] for layer in layers}

    def nbytes(self) -> int:
        """Return the bytes of cached keys and values."""
        return self.cache.nbytes()


class VectorMemory(BoundMemory):
    """A prepared memory bound to the adapter that reads it."""

    adapter: Reader

    def __init__(self, prepared: PreparedMemory, adapter: Reader) -> None:
        self.prepared, self.adapter = prepared, adapter
        self.name, self.shared = adapter.name, prepared
        self.rows = prepared.memory.tokens.shape[0]
        self.unchecked = None if prepared.memory.finite_checked else prepared.memory
        self.follows_text = adapter.follows_text

    def as_memory(self, text: TextState) -> Memory:
        return self.prepared.memory.detach()

    def shareable(self) -> PreparedMemory:
        return self.prepared

    def sources(self) -> list[Tensor]:
        return self.prepared.memory.tensors()


class ProjectedMemory(VectorMemory):
    """A prepared memory whose keys and values are projected for each layer."""

    def __init__(self, prepared: PreparedMemory, adapter: Reader) -> None:
        super().__init__(prepared, adapter)
        # The memory as the adapter reads it, and its keys and values, as inputs of a compiled host, which then projects
        # nothing. A graph cannot notice an edit of a tensor, so it is given them only by a call that was begun outside
        # of it (`condition`, `generate`), and that call checks at its end that they still hold.
        self._graph: tuple[Memory, dict[int, KeyValue]] | None = None
        self._graph_version: TensorVersion | None = None
        self._read_by_graph = False
        self.hidden = 0  # first tokens of a request of continuous batching, which see nothing

    def step(self, text: TextState) -> View:
        """Return what this forward attends to; the same object until a tensor that it depends on changes."""
        if text.rows != self.rows:
            self.check_rows(text)
        values = self.prepared.values(self.adapter)
        if values is None or self.follows_text or text.layer is not None:
            return self.see(text, values)
        key = "view", text.rows
        return values[key] if key in values else cached(values, key, partial(self.see, text, values))

    def see(self, text: TextState, values: Values | None) -> View:
        """Compute what a forward attends to, from or into the cached values."""
        prepared, adapter = self.prepared, self.adapter
        layers = adapter.layers if text.layer is None else (text.layer,)
        graph = self._graph if torch.compiler.is_compiling() and not self._may_not_cache() else None
        memory = prepared.read(adapter, values) if graph is None else graph[0]
        (rows, slots, _), device = memory.tokens.shape, memory.tokens.device
        mask = adapter.visible_slots(text, memory)
        if text.arrivals is not None:
            arrived = text.arrived_slots(slots, device)
            mask = arrived if mask is None else mask & arrived
        has_memory = None
        if not adapter.changes_all:
            allowed = combine_masks(memory.mask, mask, (text.rows, rows, 1, text.length, slots))
            has_memory = visible_rows(allowed, text.rows, slots, device=device)
        if graph is None:
            queries = text.rows // max(rows, 1) * text.length
            projected = prepared.project(adapter, layers, memory, queries, values)
        else:
            self._read_by_graph = True
            # Put together again inside the graph, which must not depend on their sizes.
            projected = {layer: replace(graph[1][layer]) for layer in layers}
        return self.view(text, projected, mask, has_memory)

    def view(
        self, text: TextState, projected: Mapping[int, Any], attention_mask: Tensor | None, has_memory: Tensor | None
    ) -> View:
        """Return keys and values by host layer, visible slots and tokens (b, l or 1, 1) that see any, as a view."""
        return ProjectedView(projected, attention_mask, has_memory)

    def hide_arrivals(self) -> None:
        if self.adapter.resampler is not None:
            super().hide_arrivals()
        self.follows_text = True

    # Continuous batching ---------------------------------------------------------------------------------------------

    def for_request(self) -> BoundMemory:
        if self.follows_text:
            super().for_request()
        check_one_row(self)
        return self

    def hide_from(self, tokens: int) -> None:
        if self.adapter.changes_all:
            super().hide_from(tokens)
        self.hidden = tokens

    def together(self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> BoundMemory:
        return RequestMemories(self.name, requests, join, keep)

    def projected(self) -> list[Tensor]:
        return [tensor for one in self.project_all().values() for tensor in one.unchecked()]

    def project_all(self) -> dict[int, KeyValue]:
        """Return keys and values by host layer for tokens that are written one by one."""
        prepared, adapter = self.prepared, self.adapter
        with torch.no_grad():
            values = prepared.values(adapter)
            return prepared.project(adapter, adapter.layers, prepared.read(adapter, values), 1, values)

    @property
    def changes_request(self) -> bool:
        """Return whether a request with this memory changes at all."""
        if self.adapter.changes_all:
            return True
        return bool(self.prepared.read(self.adapter, self.prepared.values(self.adapter)).real_slots().any())

    # Compiled hosts --------------------------------------------------------------------------------------------------

    def prepare_graph(self) -> None:
        if torch.compiler.is_compiling() or self._may_not_cache():
            return
        self.check_graph()
        read = self.prepared.read(self.adapter, self.prepared.values(self.adapter))
        projected = {layer: replace(one, visible=None, additive=None) for layer, one in self.project_all().items()}
        # A graph would depend on lengths.
        self._graph = None if any(one.lengths is not None for one in projected.values()) else (read, projected)
        self._graph_version = TensorVersion(self._graph_sources())

    def check_graph(self) -> None:
        version = self._graph_version
        if self._read_by_graph and version is not None and not version.holds(self._graph_sources()):
            raise ConditionError(
                f"weights or memory of adapter {self.name!r} were changed inside a condition block, which a compiled "
                "host cannot notice: begin a new block after each change"
            )

    def _may_not_cache(self) -> bool:
        return torch.is_grad_enabled() or torch.is_autocast_enabled(self.adapter.weight.device.type)

    def _graph_sources(self) -> list[Tensor]:
        projecting = [
            weight
            for layer in self.adapter.layers
            for weight in self.adapter.kv_projection(layer).projecting_parameters()
        ]
        return [*self.sources(), *self.adapter.reading_parameters(), *projecting]


class ProjectedView(View):
    """A memory in one forward: keys and values by host layer, and which slots each token attends to."""

    def __init__(
        self,
        projected: Mapping[int, Any],
        attention_mask: Tensor | None = None,
        has_memory: Tensor | None = None,
        query_positions: Tensor | None = None,
    ) -> None:
        self.projected, self.attention_mask, self.has_memory = projected, attention_mask, has_memory
        # Only blocks whose keys have positions take them.
        self.options = {} if query_positions is None else {"query_positions": query_positions}

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        mask, has_memory = self.attention_mask, self.has_memory
        if mask is not None and mask.device != x.device:
            mask = mask.to(x.device)
        if has_memory is not None and has_memory.device != x.device:
            has_memory = has_memory.to(x.device)
        kv, options = self.projected[layer], self.options
        return block(x, kv, attention_mask=mask, has_memory=has_memory, adapter_scale=adapter_scale, **options)


class RequestMemories(BoundMemory):
    """The memories of the requests in one step of continuous batching, which share one packed row, for one adapter."""

    def __init__(self, name: str, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> None:
        self.name, self._join, self._keep = name, join, keep
        self.requests = [one if isinstance(one, ProjectedMemory) else None for one in requests]
        self.rows = len(requests)

    def step(self, text: TextState) -> RequestsView:
        self.check_rows(text)
        packed = text.packed
        assert packed is not None, "transformers says where the requests of a step begin"
        numbers = [packed.real.sum(1)]
        if any(one is not None and one.hidden for one in self.requests):
            # A prompt that is read in parts does not begin at 0.
            assert text.positions is not None, "transformers says where in its request a token stands"
            numbers.append(packed.unpack(text.positions)[:, 0])
        lengths, *starts = torch.stack(numbers).tolist()
        seeing, first = dict[int, int](), dict[int, int]()
        for number, one in enumerate(self.requests):
            if one is not None and one.changes_request:
                first[number] = max(one.hidden - starts[0][number], 0) if starts else 0
                seeing[number] = lengths[number] - first[number]
        # Requests that write have one token each; a prompt is as long as it is.
        writing = [number for number, count in seeing.items() if count == 1]
        groups = [[number] for number, count in seeing.items() if count > 1] + ([writing] if writing else [])
        views = [
            PackedView(self._view(group), packed.select(group, [first[number] for number in group], seeing[group[0]]))
            for group in groups
        ]
        return RequestsView(views, self._keep)

    def _view(self, group: Sequence[int]) -> ProjectedView:
        parts = [one.project_all() for one in (self.requests[number] for number in group) if one is not None]
        if len(parts) == 1:
            return ProjectedView(parts[0])
        return ProjectedView(
            {layer: self._join((self.name, layer), [one[layer] for one in parts]) for layer in parts[0]}
        )


class RequestsView(View):
    """The memories of requests in one step, in groups of one length: nothing is computed on padding."""

    def __init__(self, views: Sequence[PackedView], keep: KeepFinite) -> None:
        self.views, self._keep = views, keep

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        out = x
        for view in self.views:
            out = view.apply(out, block, layer, adapter_scale)
        return self._keep(x, out)

    def pack(self, text: PackedText) -> View:
        return self


def project_layers(
    adapter: Reader, layers: Sequence[int], memory: Memory, queries: int | None = None
) -> dict[int, KeyValue]:
    """Return keys and values of a memory that an adapter has read, for so many queries per row (None: to be cached)."""
    mask, scores = memory.mask, memory.scores if adapter.score_bias else None
    # A norm or resampler may have made something of slots that are hidden: once for all layers they are 0 again.
    read = memory.tokens if mask is None else zero_hidden(memory.tokens, mask[..., None])
    projected = {}
    for layer in layers:
        projection = adapter.kv_projection(layer)
        tokens = read.to(projection.projecting_parameters()[0].device)
        projected[layer] = projection.project(tokens, mask=mask, scores=scores, queries=queries, hidden_are_zero=True)
    return projected


def check_projected(
    adapter: Reader, memory: Memory, projected: dict[int, KeyValue], cached: Values | None = None
) -> dict[int, KeyValue]:
    """Return keys and values by layer after a check that those and the biases of a finite memory are finite, too.

    A cast to half precision, a norm or a product may overflow; NaN in one row would reach others by masked attention,
    in which 0 · NaN is NaN. On a device, where that is known later only, each row must attend to itself; what is
    `cached` meanwhile is dropped if the check fails.
    """
    unchecked = [tensor for one in projected.values() for tensor in one.unchecked()]
    if not unchecked:
        return projected

    def project_row(row: Memory) -> list[Tensor]:
        again = project_layers(adapter, list(projected), adapter.read(row))
        return [tensor for one in again.values() for tensor in one.unchecked()]

    def forget() -> None:
        if cached is not None:
            cached.clear()

    is_finite = check_read(adapter, memory, unchecked, project_row, forget)
    return {layer: replace(one, finite=True) for layer, one in projected.items()} if is_finite else projected


def check_read(
    adapter: Reader,
    memory: Memory,
    read: Sequence[Tensor],
    read_row: Callable[[Memory], Sequence[Tensor]],
    forget: Callable[[], None] = lambda: None,
) -> bool:
    """Check that what an adapter computed of a memory is finite, if the values of the memory must be.

    Returns whether it may be taken for finite.
    """

    def explain() -> None:
        forget()
        _explain_overflow(adapter, memory, read_row)

    return memory.finite_checked and refuse_unless_finite(read, explain)


def _explain_overflow(adapter: Reader, memory: Memory, read_row: Callable[[Memory], Sequence[Tensor]]) -> None:
    """Raise NonFiniteError if rows of a memory are not finite as an adapter reads them."""
    with torch.no_grad():
        rows = [row for row in range(memory.batch) if not _finite(read_row(memory[row]))]
    if not rows:
        return
    if not _finite(adapter.parameters()):
        raise NonFiniteError(
            f"weights of adapter {adapter.name!r} are not finite: load others, or train with a lower learning rate"
        )
    which = f"row {', '.join(map(str, rows))} of the memory of adapter {adapter.name!r}"
    first = memory[rows[0]]
    largest = float(first.tokens.detach().abs().masked_fill(~first.real_slots()[..., None], 0).max())
    if not math.isfinite(largest):
        raise NonFiniteError(f"{which} is not finite: repair its vectors, or mask such slots out")
    dtype = autocast_dtype(adapter.weight.device) or adapter.weight.dtype
    raise NonFiniteError(
        f"{which} overflows in {str(dtype).removeprefix('torch.')} (values up to {largest:.3g}): scale its vectors, or "
        "use a wider dtype"
    )


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
