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
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import HeadSizes, Host, Scale, Site
from mmattn.adapters.resampler import Resampler, settle_resampler
from mmattn.adapters.settings import AdapterConfig, default_norm, settle, settle_nested
from mmattn.core.projection import Attended, KeyValueProjection
from mmattn.errors import AttachError, ConfigError, check_bool, check_choice, check_int
from mmattn.memory import Memory

STARTS = ("nothing", "host")
ADDED_TO = ("attention", "block")


@dataclass(frozen=True)
class DecoupledLayout:
    """Layout of published adapters, such as those for Flux, where it differs from the default.

    Args:
        slot_dim: width of the slots that `tokens` projects to; the width of the host's text by default.
        bias: keys and values have a bias.
        added_to: "attention", through its output projection, or "block": what the queries find is added as it is to
            the hidden states that the transformer block hands on.
    """

    slot_dim: int | None = None
    bias: bool = False
    added_to: str = "attention"

    def __post_init__(self) -> None:
        if self.slot_dim is not None:
            check_int("slot_dim", self.slot_dim, at_most=65536)
        check_bool("bias", self.bias)
        check_choice("added_to", self.added_to, ADDED_TO)


class BlocksConfig(AdapterConfig):
    """Base of settings whose field `blocks` names attention layers."""

    positions: ClassVar[tuple[str, ...]] = ("inside",)
    blocks: tuple[str, ...] | None

    def settle_blocks(self) -> None:
        """Check the fields `memory_dim` and `blocks`."""
        check_int("memory_dim", self.memory_dim, at_most=65536)
        blocks = self.blocks
        if blocks is None:
            return
        if isinstance(blocks, str) or not blocks or not all(isinstance(name, str) for name in blocks):
            raise ConfigError(f"blocks must be a list of beginnings of block names, got {blocks!r}")
        settle(self, blocks=tuple(blocks))

    def sites(self, host: Host) -> list[Site]:
        """Return the attention layers whose names begin as `blocks` say; None for all but single streams."""
        offered, blocks = host.sites("inside"), self.blocks
        if blocks is None:
            return [site for site in offered if site.part != "stream"]
        names = [site.module for site in offered]
        for prefix in blocks:
            if not any(name.startswith(prefix) for name in names):
                raise AttachError(f"blocks names {prefix!r}, and no attention layer begins so; there are: {names}")
        return [site for site in offered if site.module.startswith(blocks)]


@dataclass(frozen=True)
class DecoupledAdapter(BlocksConfig):
    """Settings of decoupled cross-attention for a diffusion model: a UNet or a transformer.

    Args:
        memory_dim: e, width of the memory.
        blocks: name prefixes of the attention layers with the adapter ("up", "down_blocks.2", "transformer_blocks.3",
            ...). None means all, except layers with text and picture in one stream if the host has others (Flux's
            `single_transformer_blocks`).
        tokens: project each vector of the memory to this many slots of the host's text width (IP-Adapter: 4). None
            reads the vectors directly.
        start: "nothing" (a fresh adapter changes nothing), or "host": copy the host's K and V projections, as
            IP-Adapter does.
        resampler: first reduce the memory to a few latents.
        layout: the layout of published adapters.
        memory_norm: normalise the slots that the blocks read. By default with `tokens`, or from a width of 12 on: a
            norm leaves little more than signs of a narrower vector.

    >>> DecoupledAdapter(memory_dim=24, tokens=4).tokens
    4
    """

    memory_dim: int
    blocks: tuple[str, ...] | None = None
    tokens: int | None = None
    start: str = "nothing"
    resampler: Resampler | None = None
    layout: DecoupledLayout = field(default_factory=DecoupledLayout)
    memory_norm: bool | None = None

    kind: ClassVar[str] = "decoupled"
    example_call: ClassVar[str] = "model(sample, timestep, text, memory=memory)"

    def __post_init__(self) -> None:
        self.settle_blocks()
        if self.tokens is not None:
            check_int("tokens", self.tokens, at_most=1024)
        check_choice("start", self.start, STARTS)
        settle_resampler(self)
        norm = True if self.memory_norm is None and self.tokens is not None else self.memory_norm
        settle(self, memory_norm=default_norm(norm, self.memory_dim))
        settle_nested(self, "layout", DecoupledLayout)
        if self.layout.slot_dim is not None and self.tokens is None:
            raise ConfigError("layout.slot_dim is the width of the slots of tokens=, which is not given")


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
