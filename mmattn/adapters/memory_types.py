"""Memories besides vectors that adapters may be given: streams and memories in parts.

Of a stream each forward attends to the slots that have arrived; the parts of a memory are bound each by itself, and
attention merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mmattn.adapters.base import AdapterLayers, register_memory_type
from mmattn.adapters.projection import (
    PreparedMemory,
    ProjectedMemory,
    ProjectedView,
    Reader,
    check_projected,
    project_layers,
)
from mmattn.adapters.protocols import BoundMemory, View
from mmattn.adapters.text_state import TextState
from mmattn.core.key_values import KeyValue
from mmattn.core.split_attention import KeyValueParts, summed
from mmattn.errors import ConditionError
from mmattn.memory import Memory, MemoryStream, ShardedMemory, SharedMemory, SlidingBuffer
from mmattn.storage.tensor_cache import KeyValueCache, Values, cached

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StreamKeyValues:
    """Keys and values that one adapter has computed of the slots of a stream, by layer."""

    def __init__(self, adapter: Reader, window: int | None) -> None:
        # An adapter may make several slots of each.
        self.each = adapter.read(Memory(torch.zeros(1, 1, adapter.config.memory_dim), check_finite=False)).length
        self.window = None if window is None else window * self.each
        self.buffers: dict[int, tuple[SlidingBuffer, SlidingBuffer]] = {}

    def nbytes(self) -> int:
        """Return the bytes that are held."""
        return sum(one.data.nbytes for pair in self.buffers.values() for one in pair if one.data is not None)

    def of(self, stream: MemoryStream, adapter: Reader, layer: int, start: int, stop: int) -> KeyValue:
        """Return keys and values of some slots; those that are new are projected now."""
        n = self.each
        if layer not in self.buffers or self.buffers[layer][0].stop < n * start:  # slots that nobody looked at
            self.buffers[layer] = SlidingBuffer(2, self.window, n * start), SlidingBuffer(2, self.window, n * start)
        keys, values = self.buffers[layer]
        begin = keys.stop // n
        if stop > begin:
            with torch.inference_mode(False), torch.no_grad():
                projected = _project(adapter, layer, Memory(stream.tokens(begin, stop)))
                keys.append(projected.keys)
                values.append(projected.values)
        return KeyValue(keys.get(n * start, n * stop), values.get(n * start, n * stop), finite=True)


class StreamWindow(PreparedMemory):
    """The slots of a stream that one forward attends to, as a prepared memory; the stream is locked meanwhile."""

    def __init__(self, stream: MemoryStream, start: int, stop: int) -> None:
        super().__init__(Memory(stream.tokens(start, stop), check_finite=False))
        self.stream, self.start, self.stop = stream, start, stop
        if not isinstance(stream.computed, KeyValueCache):
            stream.computed = KeyValueCache(tuple)
        self.cache = stream.computed

    def read(self, adapter: Reader, values: Values | None) -> Memory:
        """Return the slots; an adapter reads each as it arrives."""
        device = adapter.weight.device
        return self.memory if self.memory.device == device else self.memory.to(device)

    def project(
        self, adapter: Reader, layers: Sequence[int], read: Memory, queries: int, values: Values | None
    ) -> dict[int, Any]:
        """Return keys and values of the slots, the null slot of the adapter as a part of its own."""
        computed: StreamKeyValues | None = None
        if values is not None and read.length:
            computed = cached(values, "stream", partial(StreamKeyValues, adapter, self.stream.window))
        projected: dict[int, Any] = {}
        for layer in layers:
            if computed is None:
                slots = _project(adapter, layer, read)
            else:
                slots = computed.of(self.stream, adapter, layer, self.start, self.stop)
            has_null = getattr(adapter.kv_projection(layer), "null_key", None) is not None
            projected[layer] = KeyValueParts((slots,)) if has_null else slots
        return projected


class StreamMemory(BoundMemory):
    """A stream bound to the adapter that reads it."""

    follows_text = True

    def __init__(self, stream: MemoryStream, adapter: AdapterLayers) -> None:
        self.stream, self.shared, self.adapter = stream, stream, adapter
        self.name, self.rows = adapter.name, stream.rows

    def step(self, text: TextState) -> View:
        with self.stream.lock:
            window = StreamWindow(self.stream, *self.stream.ranges.setdefault(text, self.stream.visible_range()))
            bound = ProjectedMemory(window, self.adapter)
            bound.check_rows(text)
            return bound.see(text, window.values(self.adapter))

    def as_memory(self, text: TextState) -> Memory:
        return self.stream.memory()


def _project(adapter: Reader, layer: int, memory: Memory) -> KeyValue:
    """Compute keys and values of some slots in the padded layout, without a null slot; raise if they overflow."""
    projected = project_layers(adapter, [layer], adapter.read(memory))
    return check_projected(adapter, memory, projected)[layer].without_null()


def bind_stream(stream: MemoryStream, adapter: AdapterLayers, host: nn.Module) -> StreamMemory:
    """Bind a stream to an adapter for one call."""
    adapter.check_parts("stream", "a Memory, such as stream.memory()")
    adapter.check_memory(stream.memory())
    return StreamMemory(stream, adapter)


register_memory_type(MemoryStream, bind_stream)


def bind_parts(memory: SharedMemory | ShardedMemory, adapter: AdapterLayers, host: nn.Module) -> PartedMemory:
    """Bind each part of a memory to an adapter."""
    adapter.check_parts("memory in parts", "one Memory, such as Memory.cat([shared.expand(b), own])")
    parts = [part for part in (adapter.bind(one, host) for one in memory.parts) if isinstance(part, ProjectedMemory)]
    return PartedMemory(parts, memory.group)


register_memory_type(SharedMemory, bind_parts)
register_memory_type(ShardedMemory, bind_parts)


class PartedMemory(BoundMemory):
    """The parts of one memory, bound to the adapter that reads them."""

    def __init__(self, parts: Sequence[ProjectedMemory], group: ProcessGroup | None) -> None:
        self.parts, self.group = parts, group
        self.name, self.rows = parts[-1].name, parts[-1].rows
        for part in parts[:-1]:
            part.rows = None
        self.shared = self.shareable()

    def shareable(self) -> SharedMemory | ShardedMemory:
        first, last = self.parts[0].prepared, self.parts[-1].prepared
        return SharedMemory(first, last) if self.group is None else ShardedMemory(last, self.group)

    def step(self, text: TextState) -> ProjectedView:
        views = [cast(ProjectedView, part.step(text)) for part in self.parts]
        parts = [one.has_memory.expand(text.rows, 1, 1) for one in views if one.has_memory is not None]
        has_memory = torch.stack(parts).any(0) if len(parts) == len(views) else None
        if self.group is not None:
            device = self.parts[-1].adapter.weight.device
            here = torch.ones(text.rows, 1, 1, device=device) if has_memory is None else has_memory.float()
            has_memory = summed(here, self.group) > 0
        projected = {
            layer: KeyValueParts(tuple(one.projected[layer] for one in views), self.group)
            for layer in views[-1].projected
        }
        return ProjectedView(projected, views[-1].attention_mask, has_memory)

    def for_request(self) -> BoundMemory:
        raise ConditionError(
            "a request of continuous batching has a memory of one part: join them, Memory.cat([shared, own])"
        )

    def as_memory(self, text: TextState) -> Memory:
        if self.group is not None:
            raise ConditionError("the slots of this memory lie in several processes: examine it in one")
        memories = [part.as_memory(text) for part in self.parts]
        return Memory.cat([one.expand(self.rows or 1) if one.batch == 1 else one for one in memories])
