"""Memories in parts, given to any adapter that reads vectors: each part is prepared and bound by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.prepared_memory import PreparedMemory, ProjectedMemory, ProjectedView
from mmattn.adapters.protocols import MemorySource
from mmattn.adapters.text_state import TextState
from mmattn.core.distributed import summed
from mmattn.core.split_attention import KeyValueParts
from mmattn.errors import ConditionError
from mmattn.memory import Memory, ShardedMemory, SharedMemory


@dataclass(frozen=True)
class PreparedParts:
    """A memory in parts with what the adapters of a host computed of each, for many calls.

    Args:
        parts: the last has a row for each row of text, one before it is shared by all.
        group: of `torch.distributed`, where each process has slots of its own.
    """

    parts: tuple[PreparedMemory, ...]
    group: Any = None

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.parts[-1].batch

    def nbytes(self) -> int:
        """Bytes of cached keys and values."""
        return sum(part.nbytes() for part in self.parts)


def prepare(adapter: AdapterLayers, memory: SharedMemory | ShardedMemory | PreparedParts) -> PreparedParts:
    """What `adapter.prepare` makes of each part.

    Args:
        adapter: the trainable part that reads it.
        memory: what was given as `memory=`.

    Raises:
        ConditionError: a memory in parts for an adapter that must read all slots together.
    """
    parts = [adapter.prepare(part) for part in memory.parts]
    if adapter.resampler is not None or not all(isinstance(part, PreparedMemory) for part in parts):
        why = "its resampler mixes all slots" if adapter.resampler is not None else f"kind {adapter.config.kind!r}"
        raise ConditionError(
            f"adapter {adapter.name!r} reads no memory in parts ({why}): give one Memory, such as "
            "Memory.cat([shared.expand(b), own])"
        )
    return memory if isinstance(memory, PreparedParts) else PreparedParts(tuple(parts), memory.group)


def bind(adapter: AdapterLayers, prepared: PreparedParts, host: nn.Module) -> MemorySource:
    """The source of one call, of what `prepare` returned.

    Args:
        adapter: the trainable part that reads it.
        prepared: the memory.
        host: the frozen model.

    Raises:
        ConditionError: parts for an adapter whose tokens see a part of their memory only.
    """
    sources = [adapter.bind(part, host) for part in prepared.parts]
    for source in sources:
        if not isinstance(source, ProjectedMemory) or source.visibility is not None:
            raise ConditionError(
                f"the tokens of adapter {adapter.name!r} see some segments only, which a memory in parts has no order "
                "of: give one Memory"
            )
    return PartedMemory(sources, prepared.group)


class PartedMemory:
    """Parts of one memory, bound to the adapter that reads them.

    Args:
        sources: the last is of the rows, one before it is shared by all.
        group: of `torch.distributed`, where each process has slots of its own.
    """

    follows_text = False

    def __init__(self, sources: list[Any], group: Any) -> None:
        self.sources, self.group = sources, group
        self.rows: int | None = sources[-1].rows
        for source in sources[:-1]:
            source.rows = None

    def step(self, text: TextState) -> ProjectedView:
        """What this forward sees.

        Raises:
            ShapeError: the rows of the text are not those of the memory.
        """
        views = [source.step(text) for source in self.sources]
        seen = None
        if all(one.seen is not None for one in views):
            seen = torch.stack([one.seen.expand(text.rows, 1, 1) for one in views if one.seen is not None]).any(0)
        if self.group is not None:
            device = self.sources[-1].adapter.weight.device
            here = torch.ones(text.rows, 1, 1, device=device) if seen is None else seen.float()
            seen = summed(here, self.group) > 0
        projected: dict[int, Any] = {
            layer: KeyValueParts(tuple((one.projected[layer], None) for one in views), self.group)
            for layer in views[-1].projected
        }
        view: ProjectedView = self.sources[-1].view(projected, views[-1].attention_mask, seen)
        return view

    def as_memory(self, text: TextState) -> Memory:
        """All slots as one memory.

        Raises:
            ConditionError: they lie in several processes.
        """
        if self.group is not None:
            raise ConditionError("the slots of this memory lie in several processes: examine it in one")
        memories = [source.as_memory(text) for source in self.sources]
        return Memory.cat([one.expand(self.rows or 1) if one.batch == 1 else one for one in memories])
