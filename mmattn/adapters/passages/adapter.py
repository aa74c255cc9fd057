"""Passages that the host itself has read, one by one, before the text of a call (arXiv 2409.15355, section 2).

Keys and values of every layer, as the host computed them of each passage alone, stand before those of the text, and
share its softmax. Keys are turned to the positions where the passages now stand; the text begins after the last one
and sees all of them. One leading passage is what it would be in the prompt. Nothing is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from mmattn.adapters.joined.host_attention import JoinSlots
from mmattn.adapters.joined.rotation import KeyRotation
from mmattn.adapters.joined.slots import BeforeTextLayers, Capture, JoinedMemory, JoinedSlots
from mmattn.adapters.protocols import BoundMemory, HeadSizes, Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConfigError, ShapeError
from mmattn.memory import Memory


@dataclass(frozen=True)
class PassageAdapter(AdapterConfig):
    """Settings of passages that the host reads beforehand, by `mmattn.hosts.PassageCache`, and attends to.

    It has no weights. You can train the host, to read passages that do not see each other.

    >>> PassageAdapter().kind
    'passages'
    """

    kind: ClassVar[str] = "passages"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=passages.select([[0]]))"
    reads: ClassVar[str] = "what the host itself has read"
    memory_dim: ClassVar[int] = 0  # type: ignore[misc]

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> NoReturn:
        """Raise ConfigError: the host itself computes passages."""
        raise ConfigError(
            "the host reads passages itself, so there is no example: make a mmattn.hosts.PassageCache(model), add "
            "passages, and select some"
        )


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
