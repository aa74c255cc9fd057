"""The Perceiver resampler (arXiv 2204.14198, section 3.1.1 and figure 5; arXiv 2103.03206): many slots to few latents.

With M (b, m, e) and n learned latents Z (n, e), each layer does

    Z = Z + attend(norm(Z), [norm(M); norm(Z)])
    Z = Z + feed_forward(norm(Z))

Departure: the segments of a row (its images) are resampled separately, each to n latents of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.settings import default_heads, default_norm, settle, settle_nested
from mmattn.core.cross_attention import CrossAttention
from mmattn.errors import check_bool, check_float, check_int
from mmattn.memory import Memory


@dataclass(frozen=True)
class Resampler:
    """Settings of a Perceiver resampler.

    Args:
        num_latents: n, output slots for each segment (image).
        depth: number of layers.
        num_heads: h of its attention; 8 by default, fewer for a narrow memory, see `default_heads`.
        head_dim: k of its attention; 64 by default, less for a narrow memory.
        feed_forward: hidden width of its feed-forward as a multiple of e.
        norm: normalise slots and latents. By default from a width of 12 on: a norm leaves little more than signs of a
            narrower vector.

    Raises:
        ConfigError: a setting that is not allowed.
    """

    num_latents: int = 64
    depth: int = 2
    num_heads: int | None = None
    head_dim: int | None = None
    feed_forward: float = 4.0
    norm: bool | None = None

    def __post_init__(self) -> None:
        check_int("num_latents", self.num_latents, at_most=65536)
        check_int("depth", self.depth, at_most=64)
        for name in ("num_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_most=1024)
        if self.norm is not None:
            check_bool("norm", self.norm)
        check_float("feed_forward", self.feed_forward, at_least=0.01, below=64.1)

    def sized(self, memory_dim: int) -> Resampler:
        """Return these settings with every default filled in."""
        heads, width = default_heads(memory_dim, memory_dim, self.num_heads, self.head_dim)
        return replace(self, num_heads=heads, head_dim=width, norm=default_norm(self.norm, memory_dim))


def settle_resampler(config: Any) -> None:
    """Turn the field `resampler` into a `Resampler` with the sizes that it has on this memory, or leave None."""
    settle_nested(config, "resampler", Resampler, optional=True)
    resampler: Resampler | None = getattr(config, "resampler", None)
    if resampler is not None:
        settle(config, resampler=resampler.sized(config.memory_dim))


class PerceiverResampler(nn.Module):
    """Cross-attention of n learned latents over a memory of any length; the output is a memory of n slots per segment.

    Args:
        config: its settings.
        memory_dim: e, width of the memory and of the output.

    >>> few = PerceiverResampler(Resampler(num_latents=3, num_heads=2, head_dim=4), memory_dim=8)
    >>> few(Memory(torch.randn(2, 11, 8))).length
    3
    """

    def __init__(self, config: Resampler, memory_dim: int) -> None:
        super().__init__()
        config = config.sized(memory_dim)
        self.latents = nn.Parameter(torch.randn(config.num_latents, memory_dim) * 0.02)
        self.layers = nn.ModuleList(ResamplerLayer(config, memory_dim) for _ in range(config.depth))
        self.norm = nn.LayerNorm(memory_dim) if config.norm else nn.Identity()

    def forward(self, memory: Memory) -> Memory:
        """Return the latents (b, n, e) of each row, or of each segment of each row; masked if no slot is real."""
        if memory.segments is None:
            return self._resample(memory, memory.mask, None)
        real, count = memory.real_slots(), int(memory.segments.max()) + 1 if memory.segments.numel() else 1
        return Memory.cat([self._resample(memory, real & (memory.segments == part), part) for part in range(count)])

    def _resample(self, memory: Memory, mask: Tensor | None, segment: int | None) -> Memory:
        b, n = memory.batch, self.latents.shape[0]
        latents = self.latents.expand(b, -1, -1)
        for layer in self.layers:
            latents = layer(latents, memory.tokens, mask)
        alive = None
        if memory.length == 0:
            alive = torch.zeros(b, n, dtype=torch.bool, device=latents.device)
        elif mask is not None:
            alive = mask.any(1, keepdim=True).expand(b, n)
        segments = None if segment is None else torch.zeros(b, n, dtype=torch.long, device=latents.device)
        return Memory(self.norm(latents), alive, segments, check_finite=False)


class ResamplerLayer(nn.Module):
    """Cross-attention of latents over the memory and themselves, then a feed-forward, both with residuals."""

    def __init__(self, config: Resampler, dim: int) -> None:
        super().__init__()
        norms = [nn.LayerNorm(dim) if config.norm else nn.Identity() for _ in range(3)]
        self.memory_norm, self.latent_norm, self.norm = norms
        assert config.num_heads is not None
        self.attention = CrossAttention(dim, dim, config.num_heads, head_dim=config.head_dim)
        hidden = int(config.feed_forward * dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, latents: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        queries = self.latent_norm(latents)
        attended = torch.cat([self.memory_norm(tokens), queries], 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(queries.shape[:2])], 1)
        latents = latents + self.attention(queries, attended, mask=mask)
        return latents + self.down(F.gelu(self.up(self.norm(latents))))
