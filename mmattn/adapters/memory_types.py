"""Whatever is given as `memory=`, for any adapter: vectors, parts, streams, an index, or what a kind reads besides."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmattn.adapters import memory_stream as streams, searched_memory as searched, shared_memory as parts
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import MemorySource
from mmattn.errors import ConditionError
from mmattn.memory import MemoryStream, SearchedMemory, ShardedMemory, SharedMemory


def prepare(adapter: AdapterLayers, memory: Any) -> Any:
    """A memory, checked, as an object that adapters of one call share.

    Args:
        adapter: the trainable part that reads it.
        memory: what was given as `memory=`, or what this returned for another adapter.

    Raises:
        ShapeError: a memory that this adapter cannot read.
        NonFiniteError: NaN or infinity in a slot that may be attended to.
        ConditionError: parts, a stream or an index for an adapter that must read all slots together.
    """
    in_forms = SharedMemory, ShardedMemory, parts.PreparedParts, streams.PreparedStream, MemoryStream, SearchedMemory
    if adapter.position == "joined" and isinstance(memory, in_forms):
        raise ConditionError(
            f"adapter {adapter.name!r} (kind {adapter.config.kind!r}) puts keys and values of all slots beside the "
            f"host's own, and a {type(memory).__name__} does not give them all at once: give a Memory"
        )
    if isinstance(memory, (SharedMemory, ShardedMemory, parts.PreparedParts)):
        return parts.prepare(adapter, memory)
    if isinstance(memory, streams.PreparedStream):
        streams.prepare(adapter, memory.stream)
        return memory
    if isinstance(memory, MemoryStream):
        return streams.prepare(adapter, memory)
    if isinstance(memory, SearchedMemory):
        return searched.prepare(adapter, memory)
    return adapter.prepare(memory)


def bind(adapter: AdapterLayers, prepared: Any, host: nn.Module) -> MemorySource:
    """The source of one call, of what `prepare` returned.

    Args:
        adapter: the trainable part that reads it.
        prepared: the memory.
        host: the frozen model.

    Raises:
        ShapeError: a memory that does not fit.
        ConditionError: parts, a stream or an index for an adapter whose tokens see a part of their memory only.
    """
    if isinstance(prepared, parts.PreparedParts):
        return parts.bind(adapter, prepared, host)
    if isinstance(prepared, streams.PreparedStream):
        return streams.bind(adapter, prepared, host)
    if isinstance(prepared, SearchedMemory):
        return searched.bind(adapter, prepared, host)
    return adapter.bind(prepared, host)


def check_shareable(adapter: AdapterLayers, prepared: Any) -> None:
    """Refuse what cannot be kept by the caller for many calls: `model.prepare` asks.

    Args:
        adapter: the trainable part that reads it.
        prepared: the memory.

    Raises:
        ConditionError: it belongs to one call.
    """
    for one in prepared.parts if isinstance(prepared, parts.PreparedParts) else (prepared,):
        adapter.check_shareable(one)
