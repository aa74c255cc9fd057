"""Streams given to any adapter that reads vectors: each forward sees the slots that have arrived."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.prepared_memory import PreparedMemory, ProjectedMemory, ProjectedView, check_projected
from mmattn.adapters.protocols import MemorySource
from mmattn.adapters.text_state import TextState
from mmattn.core.kv_cache import KeyValue
from mmattn.core.split_attention import KeyValueParts
from mmattn.core.tensor_cache import TensorVersion, autocast_dtype
from mmattn.errors import ConditionError
from mmattn.memory import Memory, MemoryStream, SlidingBuffer


class PreparedStream:
    """A stream in one call; all adapters see the same slots in one forward.

    Args:
        stream: as it was given.
    """

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self._seen: WeakKeyDictionary[TextState, tuple[int, int]] = WeakKeyDictionary()

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.stream.rows

    def seen(self, text: TextState) -> tuple[int, int]:
        """The numbers of the first slot that a forward sees, and one past the last."""
        if text not in self._seen:
            self._seen[text] = self.stream.seen()
        return self._seen[text]


class ProjectedSlots:
    """Keys and values that one adapter has computed of the slots of a stream, by layer.

    Args:
        adapter: the trainable part that reads them.
        window: of the stream.
    """

    def __init__(self, adapter: AdapterLayers, window: int | None) -> None:
        self.adapter, self.window = weakref.ref(adapter), window
        self.version = TensorVersion(adapter.parameters())
        self.buffers: dict[int, tuple[SlidingBuffer, SlidingBuffer]] = {}
        # An adapter may make several of each slot.
        self.each = adapter.read(Memory(torch.zeros(1, 1, adapter.config.memory_dim), check_finite=False)).length

    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(one.data.nbytes for pair in self.buffers.values() for one in pair if one.data is not None)

    def is_current(self, adapter: AdapterLayers) -> bool:
        """Whether they are of this adapter, as its weights are now."""
        return self.adapter() is adapter and self.version.holds(adapter.parameters())

    def of(self, stream: MemoryStream, layer: int, start: int, stop: int) -> KeyValue:
        """Keys and values of some slots; those that are new are projected now."""
        adapter = self.adapter()
        assert adapter is not None
        n, window = self.each, None if self.window is None else self.window * self.each
        if layer not in self.buffers or self.buffers[layer][0].stop < n * start:  # slots that nobody looked at
            self.buffers[layer] = SlidingBuffer(2, window, n * start), SlidingBuffer(2, window, n * start)
        keys, values = self.buffers[layer]
        begin = keys.stop // n
        if stop > begin:
            with torch.inference_mode(False), torch.no_grad():
                projected = project(adapter, layer, Memory(stream.tokens(begin, stop)))
                keys.append(projected.keys)
                values.append(projected.values)
        return KeyValue(keys.get(n * start, n * stop), values.get(n * start, n * stop), finite=True)


class StreamWindow(PreparedMemory):
    """The slots of a stream that one forward sees, as a prepared memory.

    Args:
        stream: the stream, which is locked.
        start: number of the first slot.
        stop: one past the last.
    """

    def __init__(self, stream: MemoryStream, start: int, stop: int) -> None:
        super().__init__(Memory(stream.tokens(start, stop), check_finite=False))
        self.stream, self.start, self.stop = stream, start, stop

    def read(self, adapter: Any) -> Memory:
        """The slots; an adapter reads each as it arrives.

        Args:
            adapter: the trainable part that reads.
        """
        return self.memory

    def project(self, adapter: Any, layer: int, memory: Memory, queries: int) -> Any:
        """Keys and values of the slots, with the null slot of the adapter, where it has one, as a part of its own.

        Args:
            adapter: the trainable part that reads.
            layer: number of the host's layer.
            memory: what `read` returned.
            queries: how many attend to each row.
        """
        if self.is_uncached(adapter) or not memory.length:
            projected = project(adapter, layer, memory)
        else:
            key = adapter.name, autocast_dtype(adapter.weight.device)
            computed = self.stream.computed.get(key)
            if computed is None or not computed.is_current(adapter):
                computed = self.stream.computed[key] = ProjectedSlots(adapter, self.stream.window)
            projected = computed.of(self.stream, layer, self.start, self.stop)
        attention = adapter.attention(layer)
        has_null = getattr(attention, "kv_proj", attention).null_key is not None
        return KeyValueParts(((projected, None),)) if has_null else projected


class StreamMemory:
    """A stream bound to the adapter that reads it.

    Args:
        prepared: the stream in this call.
        adapter: the trainable part that reads it.
        host: the frozen model.
    """

    follows_text = True

    def __init__(self, prepared: PreparedStream, adapter: AdapterLayers, host: nn.Module) -> None:
        self.prepared, self.adapter, self.host = prepared, adapter, host
        self.rows: int | None = prepared.batch

    def step(self, text: TextState) -> ProjectedView:
        """What this forward sees.

        Raises:
            ShapeError: the rows of the text are not those of the stream.
            ConditionError: so much has arrived meanwhile that what it sees is forgotten.
        """
        with self.prepared.stream.lock:
            window = StreamWindow(self.prepared.stream, *self.prepared.seen(text))
            view: ProjectedView = self.adapter.bind(window, self.host).step(text)  # type: ignore[assignment]
        return view

    def as_memory(self, text: TextState) -> Memory:
        """What is seen now."""
        return self.prepared.stream.memory()


def project(adapter: Any, layer: int, memory: Memory) -> KeyValue:
    """Keys and values of some slots in the padded layout, without a null slot.

    Args:
        adapter: the trainable part that reads them.
        layer: number of the host's layer.
        memory: the slots as they arrived.

    Raises:
        NonFiniteError: keys or values overflow.
    """
    read = adapter.read(memory)
    projected: KeyValue = adapter.attention(layer).project(read.tokens)
    check_projected(adapter, layer, memory, projected)
    return projected.without_null()


def prepare(adapter: AdapterLayers, stream: MemoryStream) -> PreparedStream:
    """A stream in one call, checked.

    Args:
        adapter: the trainable part that reads it.
        stream: as it was given.

    Raises:
        ShapeError: another width than that of the adapter, or scores are missing.
        ConditionError: an adapter that must read all slots together.
    """
    if adapter.resampler is not None or not isinstance(adapter.prepare(stream.memory()), PreparedMemory):
        why = "its resampler mixes all slots" if adapter.resampler is not None else f"kind {adapter.config.kind!r}"
        raise ConditionError(
            f"adapter {adapter.name!r} reads no stream ({why}): give a Memory, such as stream.memory()"
        )
    return PreparedStream(stream)


def bind(adapter: AdapterLayers, prepared: PreparedStream, host: nn.Module) -> MemorySource:
    """The source of one call.

    Args:
        adapter: the trainable part that reads it.
        prepared: the stream in this call.
        host: the frozen model.

    Raises:
        ConditionError: an adapter whose tokens see a part of their memory only.
    """
    source = adapter.bind(PreparedMemory(prepared.stream.memory()), host)
    if not isinstance(source, ProjectedMemory) or source.visibility is not None:
        raise ConditionError(
            f"the tokens of adapter {adapter.name!r} see some segments only, and a stream has none: give a Memory"
        )
    return StreamMemory(prepared, adapter, host)
