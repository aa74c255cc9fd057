"""Decoupled cross-attention (IP-Adapter, arXiv 2308.06721, section 3.2.2 and equation 5).

With Q, K, V the queries, keys and values of a host's cross-attention, M (b, m, e) the memory and s the strength:

    Z = attend(Q, K, V) + s · attend(Q, M Wk', M Wv')

before the host's own output projection. The queries are the host's; only Wk' and Wv' are trained, and what turns the
memory into M.

Departures from the paper: by default Wv' starts at 0, so that a fresh adapter is exactly nothing, instead of as a copy
of the host's; padding of the memory is never attended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.resampler import Resampler
from mmattn.core.projection import KeyValueProjection
from mmattn.errors import ConfigError, check_choice, check_int
from mmattn.memory import Memory

STARTS = ("nothing", "host")


@dataclass(frozen=True)
class DecoupledAdapter:
    """Settings of decoupled cross-attention for a diffusion UNet.

    Args:
        memory_dim: e, width of the memory.
        tokens: turn each vector of the memory into this many slots of the host's text width (IP-Adapter's image
            projection: 4); None reads the vectors as they are, normalised.
        blocks: beginnings of the names of the attention layers that get the adapter ("up", "down_blocks.2", ...); None
            is all.
        start: "nothing", or "host": as a copy of the host's own K and V projections, as IP-Adapter starts.
        resampler: turn the memory into few latents first.

    >>> DecoupledAdapter(memory_dim=24, tokens=4).tokens
    4
    """

    memory_dim: int
    tokens: int | None = None
    blocks: tuple[str, ...] | None = None
    start: str = "nothing"
    resampler: Resampler | None = None

    kind = "decoupled"

    def __post_init__(self) -> None:
        check_int("memory_dim", self.memory_dim, at_most=65536)
        if self.tokens is not None:
            check_int("tokens", self.tokens, at_most=1024)
        if self.blocks is not None:
            if (
                isinstance(self.blocks, str)
                or not self.blocks
                or not all(isinstance(name, str) for name in self.blocks)
            ):
                raise ConfigError(f"blocks must be a list of beginnings of block names, got {self.blocks!r}")
            object.__setattr__(self, "blocks", tuple(self.blocks))
        check_choice("start", self.start, STARTS)
        if self.resampler is not None and not isinstance(self.resampler, Resampler):
            raise ConfigError(f"resampler must be a Resampler, got {self.resampler!r}")

    def build(self, host_dim: int, layers: Sequence[int], sizes: Sequence[HeadSize]) -> DecoupledLayers:
        """Make the trainable part for the attention layers `layers` of a host whose text is `host_dim` wide."""
        return DecoupledLayers(self, host_dim, layers, sizes)


class HeadSize(NamedTuple):
    """Heads h, key/value heads g and head width k of one attention layer of the host."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class DecoupledBlock(KeyValueProjection):
    """Keys and values of the memory for the queries of one attention layer of the host."""

    def __init__(self, memory_dim: int, size: HeadSize) -> None:
        width = size.num_kv_heads * size.head_dim
        k_proj, v_proj = (nn.Linear(memory_dim, width, bias=False) for _ in range(2))
        super().__init__(k_proj, v_proj, **size._asdict(), memory_dim=memory_dim)


class DecoupledLayers(AdapterLayers):
    """The trainable part of one decoupled adapter on one host.

    Args:
        config: the settings. host_dim: width of the host's text. layers: numbers of the host's attention layers.
        sizes: of each of them.
    """

    memory_norm: nn.LayerNorm

    def __init__(
        self, config: DecoupledAdapter, host_dim: int, layers: Sequence[int], sizes: Sequence[HeadSize]
    ) -> None:
        super().__init__(config, host_dim, layers)
        self._add_resampler(config.resampler)
        width = config.memory_dim
        self.projection = None
        if config.tokens is not None:
            self.projection = nn.Linear(width, config.tokens * host_dim)
            width = host_dim
        self.memory_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleDict(
            {name: DecoupledBlock(width, size) for name, size in zip(self.names.values(), sizes, strict=True)}
        )
        if config.start == "nothing":
            for layer in self.layers:
                nn.init.zeros_(self.attention(layer).v_proj.weight)

    def attention(self, layer: int) -> DecoupledBlock:
        """The block beside attention layer `layer` of the host."""
        block = self.blocks[self.names[layer]]
        assert isinstance(block, DecoupledBlock)
        return block

    def reading_parameters(self) -> Iterator[nn.Parameter]:
        """The weights that `read` uses."""
        yield from super().reading_parameters()
        if self.projection is not None:
            yield from self.projection.parameters()

    def read(self, memory: Memory) -> Memory:
        """The memory as every block sees it: resampled, projected to slots, normalised."""
        memory = self._taken_in(memory)
        if self.resampler is not None:
            memory = self.resampler(memory)
        if self.projection is None:
            return memory.replace(self.memory_norm(memory.tokens))
        b, m, n = memory.batch, memory.length, self.config.tokens
        slots = self.memory_norm(self.projection(memory.tokens).view(b, m * n, self.host_dim))
        mask, segments = (
            None if given is None else given.repeat_interleave(n, 1) for given in (memory.mask, memory.segments)
        )
        return Memory(slots, mask, segments, check_finite=False)
