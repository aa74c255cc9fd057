"""A Perceiver resampler that follows the time step of a diffusion model, as in the IP-Adapter of Stable Diffusion 3.5.

With M (b, m, e) the memory, n learned latents Z (n, d), and τ the embedded time step, each layer does

    Z = Z + attend(norm(Z) (1 + a) + b, [norm(M Wi + τ); norm(Z) (1 + a) + b])
    Z = Z + feed_forward(norm(Z) (1 + c) + d)        a, b, c, d = silu(τ) Wt

The layout is that of the weights that InstantX released, which diffusers reads as `IPAdapterTimeImageProjection`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.attention import attend
from mmattn.errors import ConfigError, check_int


@dataclass(frozen=True)
class TimedResampler:
    """Settings of a resampler that follows the time step.

    Args:
        num_latents: n, slots of the output.
        depth: number of layers.
        width: d of the latents.
        num_heads: h of its attention.
        head_dim: k of its attention.
        feed_forward: hidden width of its feed-forward as a multiple of d.
        frequencies: sines and cosines of the time step.

    Raises:
        ConfigError: a setting outside what is allowed.
    """

    num_latents: int = 64
    depth: int = 4
    width: int = 1280
    num_heads: int = 20
    head_dim: int = 64
    feed_forward: int = 4
    frequencies: int = 320

    def __post_init__(self) -> None:
        limits = {"num_latents": 65536, "depth": 64, "width": 65536, "num_heads": 1024, "head_dim": 1024}
        for name, at_most in (limits | {"feed_forward": 64, "frequencies": 65536}).items():
            check_int(name, getattr(self, name), at_most=at_most)
        if self.frequencies % 2:
            raise ConfigError(f"frequencies must be even, a sine and a cosine of each; got {self.frequencies}")


class TimedPerceiver(nn.Module):
    """Cross-attention of learned latents over a memory (b, m, memory_dim), under a time step."""

    def __init__(self, config: TimedResampler, memory_dim: int, out_dim: int) -> None:
        super().__init__()
        self.frequencies = config.frequencies
        self.latents = nn.Parameter(torch.randn(config.num_latents, config.width) / config.width**0.5)
        self.time_in = nn.Linear(config.frequencies, config.width)
        self.time_out = nn.Linear(config.width, config.width)
        self.proj_in = nn.Linear(memory_dim, config.width)
        self.layers = nn.ModuleList(TimedPerceiverLayer(config) for _ in range(config.depth))
        self.proj_out = nn.Linear(config.width, out_dim)
        self.norm_out = nn.LayerNorm(out_dim)

    def forward(self, tokens: Tensor, mask: Tensor | None, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents (b, n, out_dim) and the embedded time step (b, d)."""
        waves = sinusoids(timestep, self.frequencies).to(tokens.dtype)
        time = self.time_out(F.silu(self.time_in(waves)))
        x = self.proj_in(tokens) + time[:, None]
        latents = self.latents.expand(tokens.shape[0], -1, -1)
        for layer in self.layers:
            latents = layer(x, latents, mask, time)
        return self.norm_out(self.proj_out(latents)), time


class TimedPerceiverLayer(nn.Module):
    """Attention of the latents over memory and latents, then a feed-forward, both modulated by the time step."""

    def __init__(self, config: TimedResampler) -> None:
        super().__init__()
        width, inner = config.width, config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.memory_norm = nn.LayerNorm(width)
        self.latent_norm = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.kv_proj = nn.Linear(width, 2 * inner, bias=False)
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.modulation = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.feed_forward * width, bias=False)
        self.down = nn.Linear(config.feed_forward * width, width, bias=False)

    def forward(self, x: Tensor, latents: Tensor, mask: Tensor | None, time: Tensor) -> Tensor:
        """Return the latents (b, n, d) after attention to a memory (b, m, d), at an embedded time step (b, d)."""
        shift, scale, late_shift, late_scale = self.modulation(F.silu(time))[:, None].chunk(4, 2)
        queries = self.latent_norm(latents) * (1 + scale) + shift
        slots = torch.cat([self.memory_norm(x), queries], 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(queries.shape[:2])], 1)
            slots = slots.masked_fill(~mask[..., None], 0)
        q, (k, v) = self.q_proj(queries), self.kv_proj(slots).chunk(2, 2)
        heads = attend(*(one.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for one in (q, k, v)), mask=mask)
        assert isinstance(heads, Tensor)
        latents = latents + self.out_proj(heads.transpose(1, 2).flatten(2))
        late = self.norm(latents) * (1 + late_scale) + late_shift
        return latents + self.down(F.gelu(self.up(late)))


def sinusoids(timestep: Tensor, frequencies: int) -> Tensor:
    """Return cosines and then sines (b, frequencies) of time steps (b,), as diffusion transformers embed them.

    >>> sinusoids(torch.tensor([0.0]), 4)
    tensor([[1., 1., 0., 0.]])
    """
    half = frequencies // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32, device=timestep.device) / half)
    angles = timestep.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1)
