"""A memory averaged and added to every token: an adapter that attends to nothing, and reads a memory in its own way.

With x (b, l, d) the output of a host layer, M (b, m, e) the memory and W (e, d) = 0 at the start:

    y = x + mean(M) W
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import mmattn
from mmattn.extend import (
    AdapterConfig,
    AdapterLayers,
    Site,
    TextState,
    VectorMemory,
    View,
    register_adapter,
)


@dataclass(frozen=True)
class PooledAdapter(AdapterConfig):
    """Settings of the adapter, which is after every layer.

    Args:
        memory_dim: e, width of the memory.
    """

    memory_dim: int

    kind: ClassVar[str] = "pooled"
    positions: ClassVar[tuple[str, ...]] = ("after",)
    example_call: ClassVar[str] = "model(input_ids=input_ids, memory=memory)"


class PooledLayers(AdapterLayers):
    """A matrix for each layer."""

    def __init__(self, config: PooledAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.blocks = nn.ModuleDict(
            {str(site.layer): nn.Linear(config.memory_dim, site.width, bias=False) for site in sites}
        )
        for block in self.blocks.values():
            nn.init.zeros_(block.weight)

    @property
    def weight(self) -> Tensor:
        """A weight on the device and in the dtype in which a memory is read."""
        return self.block(self.layers[0]).weight

    def read(self, memory: mmattn.Memory) -> mmattn.Memory:
        """The mean of the real slots of each row, as a memory of one slot, which is masked where there is none."""
        memory = memory.replace(self.cast(memory))
        real = torch.ones(memory.tokens.shape[:2], dtype=torch.bool) if memory.mask is None else memory.mask
        real = real.to(memory.device)
        mean = memory.tokens.sum(1, keepdim=True) / real.sum(1).clamp(min=1)[:, None, None]
        return mmattn.Memory(mean, real.any(1, keepdim=True), check_finite=False)

    def bind_memory(self, memory: object, host: nn.Module) -> PooledMemory:
        """Bind a memory for one call."""
        return PooledMemory(self.prepare(memory), self)


class PooledMemory(VectorMemory):
    """A memory bound to the adapter for one call."""

    def step(self, text: TextState) -> PooledView:
        """Return what this forward attends to."""
        self.check_rows(text)
        return PooledView(self.prepared.read(self.adapter, self.prepared.values(self.adapter)))


class PooledView(View):
    """The mean of a memory, for the tokens of one forward."""

    def __init__(self, mean: mmattn.Memory) -> None:
        self.mean = mean

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """x (b, l, d) with the mean added; rows of beams read that of their text, rows that see nothing stay."""
        beams = x.shape[0] // self.mean.batch
        added = adapter_scale * block(self.mean.tokens.to(x.device)).repeat_interleave(beams, 0)
        assert self.mean.mask is not None
        seen = self.mean.mask.to(x.device).repeat_interleave(beams, 0)[..., None]
        return torch.where(seen, (x + added).to(x.dtype), x)


register_adapter(PooledAdapter, PooledLayers)
