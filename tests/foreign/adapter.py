"""Feature-wise modulation by a memory: FiLM (arXiv 1709.07871, equation 1) whose scale and shift each token reads.

With x (b, l, d) what goes into a host layer, M (b, m, e) the memory, D (d, r) and U (r, 2d) of low rank, and U = 0 at
the start:

    a = attend(x D, M),    γ, β = a U,    y = x ⊙ (1 + γ) + β
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import mmattn
from mmattn import register_adapter
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.settings import random_memory
from mmattn.core.kv_cache import KeyValue


@register_adapter
@dataclass(frozen=True)
class FilmAdapter:
    """Settings of feature-wise modulation, before each of some layers.

    Args:
        memory_dim: e, width of the memory.
        layers: of the host, counted from 0; all by default.
        rank: r.
        num_heads: h of the attention, dividing r.
    """

    memory_dim: int
    layers: tuple[int, ...] | None = None
    rank: int = 8
    num_heads: int = 2

    kind: ClassVar[str] = "film"
    positions: ClassVar[tuple[str, ...]] = ("before",)
    example_call: ClassVar[str] = "model(input_ids=input_ids, memory=memory)"

    def sites(self, host: Host) -> list[Site]:
        """The layers that `layers` names."""
        offered = host.sites("before")
        if self.layers is None:
            return offered
        if not set(self.layers) <= set(range(len(offered))):
            raise mmattn.errors.AttachError(f"layers {self.layers} were asked for, and the host has {len(offered)}")
        return [offered[layer] for layer in self.layers]

    def build(self, sites: Sequence[Site]) -> FilmLayers:
        """The trainable part for these sites."""
        return FilmLayers(self, sites)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> mmattn.Memory:
        """A random memory, some slots masked."""
        return random_memory(generator, rows, self.memory_dim)


class FilmBlock(nn.Module):
    """The modulation before one layer."""

    def __init__(self, config: FilmAdapter, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, config.rank, bias=False)
        self.attention = mmattn.CrossAttention(config.rank, config.memory_dim, config.num_heads)
        self.up = nn.Linear(config.rank, 2 * width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(
        self,
        x: Tensor,
        memory: KeyValue,
        *,
        attention_mask: Tensor | None = None,
        seen: Tensor | None = None,
        adapter_scale: Any = 1.0,
    ) -> Tensor:
        """x (b, l, d), modulated; a token that sees nothing passes through bit for bit."""
        wide = x.to(self.up.weight.dtype)
        found = self.attention(self.down(wide), memory, attention_mask=attention_mask)
        scale, shift = self.up(found).chunk(2, -1)
        out = (wide + adapter_scale * (wide * scale + shift)).to(x.dtype)
        return out if seen is None else torch.where(seen, out, x)


class FilmLayers(AdapterLayers):
    """The trainable part of the adapter on one host: a block for each site, and how a memory is read."""

    def __init__(self, config: FilmAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.blocks = nn.ModuleDict({str(site.layer): FilmBlock(config, site.width) for site in sites})

    @property
    def weight(self) -> Tensor:
        """A weight on the device and in the dtype in which a memory is read."""
        return self.block(self.layers[0]).down.weight

    def attention(self, layer: int) -> Any:
        """What attends at a layer."""
        return self.block(layer).attention

    def read(self, memory: mmattn.Memory) -> mmattn.Memory:
        """The memory as every block sees it: as it is, in the dtype of the weights."""
        return memory.replace(self.cast(memory))
