"""Decoupled cross-attention (IP-Adapter, arXiv 2308.06721, section 3.2.2 and equation 5).

With Q, K, V the queries, keys and values of a host's cross-attention, M (b, m, e) the memory and s the adapter_scale:

    Z = attend(Q, K, V) + s · attend(Q, M Wk', M Wv')

before the host's own output projection. The queries are the host's; only Wk' and Wv' are trained, and what turns the
memory into M.

Departures from the paper: by default Wv' starts at 0, so that a fresh adapter is exactly nothing, instead of as a copy
of the host's; padding of the memory is never attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.decoupled.config import DecoupledAdapter
from mmattn.adapters.protocols import HeadSizes, Scale, Site
from mmattn.core.key_value_projection import Attended, KeyValueProjection
from mmattn.errors import AttachError
from mmattn.memory import Memory


class DecoupledBlock(KeyValueProjection):
    """Attention of the queries of one attention layer of the host over the memory (b, m, memory_dim)."""

    def __init__(self, memory_dim: int, size: HeadSizes, bias: bool = False) -> None:
        width = size.num_kv_heads * size.head_dim
        k_proj, v_proj = (nn.Linear(memory_dim, width, bias=bias) for _ in range(2))
        super().__init__(k_proj, v_proj, **size.heads(), memory_dim=memory_dim)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        memory: Attended,
        *,
        attention_mask: None = None,
        has_memory: Tensor | None = None,
        adapter_scale: Scale = 1.0,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the attention (b, h, l, k) of the host's queries, times the scale; 0 where a row sees nothing."""
        attended = super().forward(q, memory, return_weights=return_weights)
        heads, weights = attended if isinstance(attended, tuple) else (attended, None)
        heads = heads if isinstance(adapter_scale, float) and adapter_scale == 1 else heads * adapter_scale
        return heads if weights is None else (heads, weights)


class DecoupledLayers(AdapterLayers):
    """The trainable part of one decoupled adapter on one host."""

    config: DecoupledAdapter
    separable = True

    def __init__(self, config: DecoupledAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self._add_reader(False, config.resampler)
        self.traits = replace(self.traits, adds_to_block=config.layout.added_to == "block")
        width, self.slot_dim = config.memory_dim, config.layout.slot_dim or self.sites[0].width
        self.projection = None
        if config.tokens is not None:
            self.projection = nn.Linear(width, config.tokens * self.slot_dim)
            width = self.slot_dim
        self.memory_norm = nn.LayerNorm(width) if config.memory_norm else None
        self.blocks = nn.ModuleDict(
            {str(site.layer): DecoupledBlock(width, site.sizes, config.layout.bias) for site in self.sites}
        )
        if config.start == "nothing":
            for layer in self.layers:
                for parameter in self.attention(layer).v_proj.parameters():
                    nn.init.zeros_(parameter)

    def attention(self, layer: int) -> DecoupledBlock:
        return cast(DecoupledBlock, self.block(layer))

    @torch.no_grad()
    def initialise(self, host: Any) -> None:
        """Copy the host's own key and value projections, with start="host"."""
        if self.config.start != "host":
            return
        for layer in self.layers:
            block, (k, v) = self.attention(layer), host.key_value_weights(layer)
            if k.shape != block.k_proj.weight.shape:
                raise AttachError(
                    f"start='host' copies projections of text {k.shape[1]} wide, and the memory comes "
                    f"{block.memory_dim} wide: give tokens=, or start='nothing'"
                )
            block.k_proj.weight.copy_(k)
            block.v_proj.weight.copy_(v)

    def read(self, memory: Memory) -> Memory:
        """Return the memory as every block attends to it: resampled, projected to slots, normalised."""
        memory = memory.replace(self.cast(memory))
        memory = memory if self.resampler is None else self.resampler(memory)
        n = self.config.tokens
        if self.projection is not None and n is not None:
            mask, segments = (
                None if one is None else one.repeat_interleave(n, 1) for one in (memory.mask, memory.segments)
            )
            slots = self.projection(memory.tokens).view(memory.batch, memory.length * n, self.slot_dim)
            memory = Memory(slots, mask, segments, check_finite=False)
        return memory if self.memory_norm is None else memory.replace(self.memory_norm(memory.tokens))
