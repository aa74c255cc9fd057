"""A `MemoryStream` given to any adapter that reads vectors: each forward attends to the slots that have arrived."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mmattn.adapters.base import AdapterLayers, register_memory_type
from mmattn.adapters.prepared_memory import PreparedMemory, check_projected
from mmattn.adapters.projected_memory import ProjectedMemory, ProjectedView
from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import TextState
from mmattn.core.kv_cache import KeyValue
from mmattn.core.split_attention import KeyValueParts
from mmattn.core.tensor_cache import KeyValueCache
from mmattn.memory import Memory, MemoryStream, SlidingBuffer


class StreamInCall:
    """A stream in one call: all adapters attend to the same slots in one forward."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self._windows: WeakKeyDictionary[TextState, tuple[int, int]] = WeakKeyDictionary()

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.stream.rows

    def window(self, text: TextState) -> tuple[int, int]:
        """Return the number of the first slot that a forward attends to, and one past the last."""
        if text not in self._windows:
            self._windows[text] = self.stream.seen()
        return self._windows[text]


class StreamKeyValues:
    """Keys and values that one adapter has computed of the slots of a stream, by layer."""

    def __init__(self, adapter: AdapterLayers, window: int | None) -> None:
        # An adapter may make several slots of each.
        self.each = adapter.read(Memory(torch.zeros(1, 1, adapter.config.memory_dim), check_finite=False)).length
        self.window = None if window is None else window * self.each
        self.buffers: dict[int, tuple[SlidingBuffer, SlidingBuffer]] = {}

    def nbytes(self) -> int:
        """Return the bytes that are held."""
        return sum(one.data.nbytes for pair in self.buffers.values() for one in pair if one.data is not None)

    def of(self, stream: MemoryStream, adapter: AdapterLayers, layer: int, start: int, stop: int) -> KeyValue:
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
        if stream.computed is None:
            stream.computed = KeyValueCache(tuple)

    def read(self, adapter: AdapterLayers) -> Memory:
        """Return the slots; an adapter reads each as it arrives."""
        return self.memory

    def project(self, adapter: AdapterLayers, layer: int, memory: Memory, queries: int) -> Any:
        """Return keys and values of the slots, the null slot of the adapter as a part of its own."""
        if self.is_uncached(adapter) or not memory.length:
            projected = _project(adapter, layer, memory)
        else:
            stream = self.stream
            computed = stream.computed.get(adapter, "stream", lambda: StreamKeyValues(adapter, stream.window))
            projected = computed.of(stream, adapter, layer, self.start, self.stop)
        has_null = adapter.kv_projection(layer).null_key is not None
        return KeyValueParts(((projected, None),)) if has_null else projected


class StreamMemory(BoundMemory):
    """A stream bound to the adapter that reads it."""

    follows_text = True

    def __init__(self, shared: StreamInCall, adapter: AdapterLayers) -> None:
        self.stream, self.shared, self.adapter = shared, shared, adapter
        self.name, self.rows = adapter.name, shared.batch

    def step(self, text: TextState) -> ProjectedView:
        with self.stream.stream.lock:
            window = StreamWindow(self.stream.stream, *self.stream.window(text))
            bound = self.adapter.bind_vectors(window)
            assert isinstance(bound, ProjectedMemory)
            bound.check_rows(text)
            return bound.see(text)

    def as_memory(self, text: TextState) -> Memory:
        return self.stream.stream.memory()


def _project(adapter: AdapterLayers, layer: int, memory: Memory) -> KeyValue:
    """Compute keys and values of some slots in the padded layout, without a null slot; raise if they overflow."""
    read = adapter.read(memory)
    projected: KeyValue = adapter.attention(layer).project(read.tokens)
    check_projected(adapter, layer, memory, projected)
    return projected.without_null()


def bind_stream(stream: MemoryStream | StreamInCall, adapter: AdapterLayers, host: nn.Module) -> StreamMemory:
    """Bind a stream to an adapter for one call."""
    shared = StreamInCall(stream) if isinstance(stream, MemoryStream) else stream
    adapter.check_parts("stream", "a Memory, such as stream.memory()")
    adapter.check_memory(shared.stream.memory())
    return StreamMemory(shared, adapter)


register_memory_type(MemoryStream, bind_stream)
register_memory_type(StreamInCall, bind_stream)
