"""What an adapter, its memory and its host must offer each other: so that a new kind is one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from mmattn.adapters.text_state import TextState
from mmattn.memory import Memory

POSITIONS = ("before", "after", "inside", "joined")


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of one attention layer of a host.

    Args:
        num_heads: h.
        num_kv_heads: g.
        head_dim: k.
        value_dim: v, the width of a value; k by default.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None


@dataclass(frozen=True)
class Site:
    """One place of a host at which an adapter may act.

    Args:
        layer: number of the host's layer, counted from 0; those of an encoder after those of its decoder.
        position: "before" or "after" the layer, on its hidden states (b, l, d); "inside" an attention layer, on its
            queries (b, h, l, k); "joined" with the keys and values of an attention layer, a `HostAttention`.
        module: dotted name of the layer in the host.
        width: d of the hidden states; "inside", the width of what the host's own keys and values are projected from.
        device: where the hidden states are, so where the adapter's block belongs.
        heads: "inside" and "joined", the sizes of the host's attention.
        part: "encoder" or "decoder", where a host has both; "stream", where text and picture are in one stream and the
            host has layers, too, in which the picture is apart.
    """

    layer: int
    position: str
    module: str
    width: int
    device: torch.device
    heads: HeadSizes | None = None
    part: str | None = None


class Host(Protocol):
    """What an adapter's settings may ask of the host that they are put on."""

    def sites(self, position: str) -> list[Site]:
        """Every site of this position, in the order of the layers."""


class View(Protocol):
    """What the tokens of one forward see of a memory."""

    def apply(self, x: Any, block: nn.Module, layer: int, adapter_scale: Any) -> Any:
        """What x becomes at a site.

        Args:
            x: hidden states (b, l, d), which come back changed; "inside" an attention layer its queries (b, h, l, k),
                for which comes back what is added to the result of the host's heads; "joined" a `HostAttention`, which
                comes back with more keys and values.
            block: the adapter's block at this layer.
            layer: number of the host's layer.
            adapter_scale: multiplies what is added.
        """


class MemorySource(Protocol):
    """What `memory=` becomes for one call: a memory bound to the adapter that reads it.

    Attributes:
        rows: rows of the memory; None fits any text.
        follows_text: whether `step` must know the text; where it need not, a host may be called in part or compiled.
    """

    rows: int | None
    follows_text: bool

    def step(self, text: TextState) -> View:
        """What this forward sees; called once for each forward of the host.

        Raises:
            ShapeError: the rows do not fit.
            ConditionError: something that must be known of the text is not.
        """

    def as_memory(self, text: TextState) -> Memory:
        """Everything that a whole text sees as one `Memory`, for experiments with other contents.

        Raises:
            ConfigError: there is no such memory.
        """


class AdapterConfig(Protocol):
    """The settings of one kind of adapter: a frozen dataclass, registered by `register_adapter`.

    Attributes:
        kind: the name of the kind in `adapter_config.json`.
        positions: the positions of the sites it acts at.
        example_call: one line of code for the card of a saved adapter.
    """

    kind: ClassVar[str]
    positions: ClassVar[tuple[str, ...]]
    example_call: ClassVar[str]

    @property
    def memory_dim(self) -> int:
        """e, width of the memory; 0 where it is no vectors."""

    def sites(self, host: Host) -> list[Site]:
        """Where the adapter acts on this host.

        Raises:
            AttachError: the host has no such layers.
        """

    def build(self, sites: Sequence[Site]) -> nn.Module:
        """The trainable part for these sites, an `AdapterLayers`."""

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Any:
        """A random memory that this adapter can read, some of its slots masked; for the doctor and the shared tests.

        Raises:
            ConfigError: none can be made up for this kind.
        """
