"""Decoupled attention over picture and memory together, as in the IP-Adapter of Stable Diffusion 3.5 (InstantX).

With Q, K, V what the host projects of its picture, before its own norms, M the memory resampled under the time step and
s the adapter_scale:

    Z = heads of the host + s g attend(norm(Q), [norm(K); norm(M' Wk)], [V; M' Wv])     M' = norm(M) (1 + a) + b

before the host's own output projection; a, b = silu(τ) Wt of the embedded time step τ. Keys and values follow the time
step and are computed at each one. Each layer of the resampler turns n learned latents Z (n, d) into

    Z = Z + attend(norm(Z) (1 + a) + b, [norm(M Wi + τ); norm(Z) (1 + a) + b])
    Z = Z + feed_forward(norm(Z) (1 + c) + d)        a, b, c, d = silu(τ) Wt

in the layout of the weights that InstantX released, which diffusers reads as `IPAdapterTimeImageProjection`.

Departure from what was released: a gate g for each layer, 0 at first, so that a fresh adapter is exactly nothing, and 1
in files that were released; rows without a memory are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.decoupled.adapter import BlocksConfig
from mmattn.adapters.projection import ProjectedView, VectorMemory, check_read
from mmattn.adapters.protocols import HeadSizes, Scale, Site, Traits
from mmattn.adapters.settings import settle_nested
from mmattn.adapters.text_state import TextState
from mmattn.core.attention import attend
from mmattn.errors import ConditionError, ConfigError, check_int
from mmattn.memory import Memory


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
        ConfigError: a setting that is not allowed.
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


@dataclass(frozen=True)
class JointDecoupledAdapter(BlocksConfig):
    """Settings of decoupled attention over picture and memory for a diffusion transformer.

    Args:
        memory_dim: e, width of the memory.
        blocks: name prefixes of the attention layers with the adapter ("transformer_blocks.3", ...). None means all,
            except layers with text and picture in one stream if the host has others.
        resampler: reduces the memory to latents, conditioned on the timestep.

    >>> JointDecoupledAdapter(memory_dim=24).resampler.num_latents
    64
    """

    memory_dim: int
    blocks: tuple[str, ...] | None = None
    resampler: TimedResampler = field(default_factory=TimedResampler)

    kind: ClassVar[str] = "joint_decoupled"
    example_call: ClassVar[str] = "model(hidden_states=sample, timestep=timestep, …, memory=memory)"

    def __post_init__(self) -> None:
        self.settle_blocks()
        settle_nested(self, "resampler", TimedResampler)


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


class JointDecoupledBlock(nn.Module):
    """Attention of a host's queries over its own picture and a memory of width `dim`, in one layer."""

    #: Its input is what the host projects of its picture, before the host's norms.
    reads_projections = True

    def __init__(self, dim: int, time_dim: int, size: HeadSizes) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.modulation = nn.Linear(time_dim, 2 * dim)
        self.k_proj = nn.Linear(dim, size.num_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, size.num_heads * size.head_dim, bias=False)
        self.q_norm, self.k_norm, self.memory_k_norm = (nn.RMSNorm(size.head_dim, eps=1e-6) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        x: Tensor,
        resampled: tuple[Memory, Tensor],
        *,
        attention_mask: None = None,
        has_memory: None = None,
        adapter_scale: Scale = 1.0,
    ) -> Tensor:
        """Return the attention (b, h, l, k) of x (b, 3h, l, k) over picture and latents, 0 in rows without a memory."""
        memory, time = resampled
        q, k, v = x.to(self.gate.dtype).split(self.num_heads, 1)
        shift, scale = self.modulation(F.silu(time))[:, None].chunk(2, 2)
        tokens = F.layer_norm(memory.tokens, memory.tokens.shape[-1:], eps=1e-6) * (1 + scale) + shift
        memory_k, memory_v = (
            projection(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.k_proj, self.v_proj)
        )
        keys = torch.cat([self.k_norm(k), self.memory_k_norm(memory_k)], 2)
        heads = attend(self.q_norm(q), keys, torch.cat([v, memory_v], 2))
        assert isinstance(heads, Tensor)
        if memory.mask is not None:
            # A row has all of its latents, or none.
            heads = torch.where(memory.mask[:, :1, None, None], heads, 0)
        return (heads * self.gate).to(x.dtype) * adapter_scale


class JointDecoupledLayers(AdapterLayers):
    """The trainable part of one such adapter on one host."""

    # Latents attend to each other beside the slots.
    traits = Traits(duplicates_matter=True)
    follows_text = True

    def __init__(self, config: JointDecoupledAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        size = self.sites[0].sizes
        dim = size.num_heads * size.head_dim
        self.perceiver = TimedPerceiver(config.resampler, config.memory_dim, dim)
        self.blocks = nn.ModuleDict(
            {str(site.layer): JointDecoupledBlock(dim, config.resampler.width, site.sizes) for site in self.sites}
        )

    def resample(self, memory: Memory, timestep: Tensor) -> tuple[Memory, Tensor]:
        """Return the latents (b, n, d) of a memory at time steps (b,), and the time steps embedded."""
        tokens, time = self.perceiver(memory.tokens, memory.mask, timestep.to(memory.device))
        mask = None if memory.mask is None else memory.mask.any(1, keepdim=True).expand(tokens.shape[:2])
        if memory.length == 0:
            mask = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return Memory(tokens, mask, check_finite=False), time

    def bind_memory(self, memory: object, host: nn.Module) -> TimedMemory:
        return TimedMemory(self.prepare(memory), self)


class TimedMemory(VectorMemory):
    """A prepared memory bound to an adapter that resamples it at every time step."""

    adapter: JointDecoupledLayers

    def step(self, text: TextState) -> ProjectedView:
        timestep, adapter = text.timestep, self.adapter
        if timestep is None:
            raise ConditionError(
                f"adapter {self.name!r} needs one timestep for each row: call the whole host with a timestep (b,)"
            )
        resampled = adapter.resample(self.prepared.read(adapter, self.prepared.values(adapter)), timestep)

        def resample_row(row: Memory) -> list[Tensor]:
            return [adapter.resample(adapter.read(row), timestep[:1])[0].tokens]

        check_read(adapter, self.prepared.memory, [resampled[0].tokens], resample_row)
        return ProjectedView(dict.fromkeys(adapter.layers, resampled))
