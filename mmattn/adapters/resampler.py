"""The Perceiver resampler: many slots to few (arXiv 2204.14198, section 3.1.1 and figure 5; arXiv 2103.03206).

With M (b, m, e) and n learned latents Z (n, e), each layer does

    Z = Z + attend(norm(Z), [norm(M); norm(Z)])
    Z = Z + feed_forward(norm(Z))

Departure: images that share a row are resampled one by one, each to its own n latents, told apart by `segments`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.layers import CrossAttention
from mmattn.errors import check_float, check_int
from mmattn.memory import Memory


@dataclass(frozen=True)
class Resampler:
    """Settings of a Perceiver resampler.

    Args:
        num_latents: n, slots that come out for each image. depth: number of layers.
        num_heads, head_dim: of its attention. feed_forward: hidden width as a multiple of e.
    """

    num_latents: int = 64
    depth: int = 2
    num_heads: int = 8
    head_dim: int = 64
    feed_forward: float = 4.0

    def __post_init__(self) -> None:
        check_int("num_latents", self.num_latents, at_most=65536)
        check_int("depth", self.depth, at_most=64)
        check_int("num_heads", self.num_heads, at_most=1024)
        check_int("head_dim", self.head_dim, at_most=1024)
        check_float("feed_forward", self.feed_forward, at_least=0.01, below=64.1)


class PerceiverResampler(nn.Module):
    """A memory of any length to one of `num_latents` slots per image.

    >>> few = PerceiverResampler(Resampler(num_latents=3, num_heads=2, head_dim=4), memory_dim=8)
    >>> few(Memory(torch.randn(2, 11, 8))).length
    3
    """

    def __init__(self, config: Resampler, memory_dim: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(config.num_latents, memory_dim) * 0.02)
        self.layers = nn.ModuleList(ResamplerLayer(config, memory_dim) for _ in range(config.depth))
        self.norm = nn.LayerNorm(memory_dim)

    def forward(self, memory: Memory) -> Memory:
        """Resample each row, or each segment of each row; rows and segments without a real slot stay without."""
        if memory.segments is None:
            return self._resample(memory, memory.mask, None)
        real = memory.segments.new_ones(memory.segments.shape, dtype=torch.bool) if memory.mask is None else memory.mask
        count = int(memory.segments.max()) + 1 if memory.segments.numel() else 1
        parts = [self._resample(memory, real & (memory.segments == part), part) for part in range(count)]
        return Memory.cat(parts) if len(parts) > 1 else parts[0]

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
    """Latents look at the memory and at themselves, then a feed-forward."""

    def __init__(self, config: Resampler, dim: int) -> None:
        super().__init__()
        self.memory_norm = nn.LayerNorm(dim)
        self.latent_norm = nn.LayerNorm(dim)
        self.attention = CrossAttention(dim, dim, config.num_heads, head_dim=config.head_dim)
        self.norm = nn.LayerNorm(dim)
        hidden = int(config.feed_forward * dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, latents: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Latents (b, n, e) after looking at tokens (b, m, e)."""
        own = self.latent_norm(latents)
        looked_at = torch.cat([self.memory_norm(tokens), own], 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(own.shape[:2])], 1)
        latents = latents + self.attention(own, looked_at, mask=mask)
        return latents + self.down(F.gelu(self.up(self.norm(latents))))
