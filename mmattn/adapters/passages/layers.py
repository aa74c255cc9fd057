"""The trainable part of one adapter on one host, and the memory of a call for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mmattn.adapters.joined.host_attention import JoinSlots
from mmattn.adapters.joined.rotation import KeyRotation
from mmattn.adapters.joined.slots import BeforeTextLayers, Capture, JoinedMemory, JoinedSlots
from mmattn.adapters.passages.config import PassageAdapter
from mmattn.adapters.protocols import BoundMemory, HeadSizes, Site
from mmattn.adapters.text_state import TextState
from mmattn.errors import ShapeError
from mmattn.memory import Memory


class Passages(ABC):
    """Rows of passages that a host has read, given to a `PassageAdapter` as `memory=`."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Number of rows b."""

    @abstractmethod
    def slots(self, adapter: PassageLayers) -> JoinedSlots:
        """Return keys and values of every layer; ConditionError if another host or other weights computed them."""


class LayerGroup(NamedTuple):
    """Layers of a host whose keys are of the same sizes, on the same device, and rotated alike."""

    layers: list[int]
    device: torch.device
    heads: HeadSizes
    rotation: KeyRotation | None


class PassageLayers(BeforeTextLayers):
    """A passage adapter on one host."""

    def __init__(self, config: PassageAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.blocks = nn.ModuleDict({str(site.layer): JoinSlots() for site in self.sites})
        self.register_buffer("place", torch.zeros(0), persistent=False)

    @property
    def weight(self) -> Tensor:
        """An empty tensor on the device of the first layer."""
        return cast(Tensor, self.place)

    def groups(self) -> list[LayerGroup]:
        """Return the layers in groups whose keys, and values, are one tensor."""
        groups: dict[object, LayerGroup] = {}
        for site in self.sites:
            rotation = None if self.rotations is None else self.rotations[site.layer]
            heads = replace(site.sizes, num_heads=0)  # of the queries, which keys do not have
            groups.setdefault(
                (site.device, heads, rotation), LayerGroup([], site.device, heads, rotation)
            ).layers.append(site.layer)
        return list(groups.values())

    def read(self, memory: Memory) -> Memory:
        raise ShapeError(_NO_PASSAGES.format(name=self.name, memory="a Memory"))

    def bind_memory(self, memory: object, host: nn.Module) -> BoundMemory:
        """Bind selected passages; ConditionError if another host or other weights computed them."""
        if isinstance(memory, Capture):
            return memory
        if not isinstance(memory, Passages):
            raise ShapeError(_NO_PASSAGES.format(name=self.name, memory=type(memory).__name__))
        slots = memory.slots(self)

        def slots_for(text: TextState | None) -> JoinedSlots:
            # Where a text begins, the host must compute as when it read the passages.
            if text is not None and not text.past and not torch.compiler.is_compiling():
                memory.slots(self)
            return slots

        return JoinedMemory(self.name, slots.batch, slots_for, memory)


_NO_PASSAGES = (
    "adapter {name!r} (kind 'passages') reads what the host has read before, got {memory}: give it "
    "passages.select([[0, 2], [1]]) of passages = mmattn.hosts.PassageCache(model)"
)
