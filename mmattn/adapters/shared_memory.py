"""A memory in parts, `SharedMemory` or `ShardedMemory`: each part is bound by itself, attention merges them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mmattn.adapters.base import AdapterLayers, register_memory_type
from mmattn.adapters.projected_memory import ProjectedMemory, ProjectedView
from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import TextState
from mmattn.core.distributed import summed
from mmattn.core.split_attention import KeyValueParts
from mmattn.errors import ConditionError
from mmattn.memory import Memory, ShardedMemory, SharedMemory


def bind_parts(memory: SharedMemory | ShardedMemory, adapter: AdapterLayers, host: nn.Module) -> PartedMemory:
    """Bind each part of a memory to an adapter."""
    adapter.check_parts("memory in parts", "one Memory, such as Memory.cat([shared.expand(b), own])")
    parts = [part for part in (adapter.bind(one, host) for one in memory.parts) if isinstance(part, ProjectedMemory)]
    return PartedMemory(parts, memory.group)


register_memory_type(SharedMemory, bind_parts)
register_memory_type(ShardedMemory, bind_parts)


class PartedMemory(BoundMemory):
    """The parts of one memory, bound to the adapter that reads them."""

    def __init__(self, parts: Sequence[ProjectedMemory], group: Any) -> None:
        self.parts, self.group = parts, group
        self.name, self.rows = parts[-1].name, parts[-1].rows
        for part in parts[:-1]:
            part.rows = None
        self.shared = self.shareable()

    def shareable(self) -> SharedMemory | ShardedMemory:
        first, last = self.parts[0].prepared, self.parts[-1].prepared
        return SharedMemory(first, last) if self.group is None else ShardedMemory(last, self.group)

    def step(self, text: TextState) -> ProjectedView:
        views = [part.step(text) for part in self.parts]
        seen = None
        if all(one.seen is not None for one in views):
            seen = torch.stack([one.seen.expand(text.rows, 1, 1) for one in views if one.seen is not None]).any(0)
        if self.group is not None:
            device = self.parts[-1].adapter.weight.device
            here = torch.ones(text.rows, 1, 1, device=device) if seen is None else seen.float()
            seen = summed(here, self.group) > 0
        projected = {
            layer: KeyValueParts(tuple((one.projected[layer], None) for one in views), self.group)
            for layer in views[-1].projected
        }
        return self.parts[-1].view(projected, views[-1].attention_mask, seen)

    def for_request(self) -> BoundMemory:
        raise ConditionError(
            "a request of continuous batching has a memory of one part: join them, Memory.cat([shared, own])"
        )

    def as_memory(self, text: TextState) -> Memory:
        if self.group is not None:
            raise ConditionError("the slots of this memory lie in several processes: examine it in one")
        memories = [part.as_memory(text) for part in self.parts]
        return Memory.cat([one.expand(self.rows or 1) if one.batch == 1 else one for one in memories])
