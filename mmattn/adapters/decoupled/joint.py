"""Decoupled attention over picture and memory together, as in the IP-Adapter of Stable Diffusion 3.5 (InstantX).

With Q, K, V what the host projects of its picture, before its own norms, M the memory resampled under the time step and
s the adapter_scale:

    Z = heads of the host + s g attend(norm(Q), [norm(K); norm(M' Wk)], [V; M' Wv])     M' = norm(M) (1 + a) + b

before the host's own output projection; a, b = silu(τ) Wt of the embedded time step τ. Keys and values follow the time
step and are computed at each one.

Departure from what was released: a gate g for each layer, 0 at first, so that a fresh adapter is exactly nothing, and 1
in files that were released; rows without a memory are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.decoupled.adapter import InsideAdapter
from mmattn.adapters.decoupled.timed_resampler import TimedPerceiver, TimedResampler
from mmattn.adapters.prepared_memory import PreparedMemory, check_read
from mmattn.adapters.projected_memory import VectorMemory
from mmattn.adapters.protocols import HeadSizes, Scale, Site, View
from mmattn.adapters.registry import register_adapter
from mmattn.adapters.text_state import TextState
from mmattn.core.attention import attend
from mmattn.errors import ConditionError, ConfigError
from mmattn.memory import Memory


@register_adapter
@dataclass(frozen=True)
class JointDecoupledAdapter(InsideAdapter):
    """Settings of decoupled attention over picture and memory for a diffusion transformer.

    Args:
        memory_dim: e, width of the memory.
        blocks: as in `DecoupledAdapter`.
        resampler: what turns the memory into latents under the time step.

    >>> JointDecoupledAdapter(memory_dim=24).resampler.num_latents
    64
    """

    resampler: TimedResampler = field(default_factory=TimedResampler)

    kind: ClassVar[str] = "joint_decoupled"
    example_call: ClassVar[str] = "model(hidden_states=sample, timestep=timestep, …, memory=memory)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.resampler, TimedResampler):
            raise ConfigError(f"resampler must be a TimedResampler, got {self.resampler!r}")

    def build(self, sites: Sequence[Site]) -> JointDecoupledLayers:
        """Return the trainable part for these sites."""
        return JointDecoupledLayers(self, sites)


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
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, memory: Memory, time: Tensor) -> Tensor:
        """Compute the attention (b, h, l, k), 0 in rows without a memory."""
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
        return (heads * self.gate).to(x.dtype)


class JointDecoupledLayers(AdapterLayers):
    """The trainable part of one such adapter on one host."""

    # Latents attend to each other beside the slots.
    counts_slots = True

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

    def bind_vectors(self, prepared: PreparedMemory) -> TimedMemory:
        return TimedMemory(prepared, self)


class TimedMemory(VectorMemory):
    """A prepared memory bound to an adapter that resamples it at every time step."""

    follows_text = True

    def step(self, text: TextState) -> TimedView:
        timestep = text.timestep
        if timestep is None:
            raise ConditionError(
                f"adapter {self.name!r} needs one timestep for each row: call the whole host with a timestep (b,)"
            )
        latents, time = self.adapter.resample(self.prepared.read(self.adapter), timestep)

        def resample_row(row: Memory) -> list[Tensor]:
            return [self.adapter.resample(self.adapter.read(row), timestep[:1])[0].tokens]

        check_read(self.adapter, self.prepared.memory, [latents.tokens], resample_row)
        return TimedView(latents, time)


class TimedView(View):
    """Latents (b, n, d) of a memory at one time step, embedded as (b, c)."""

    def __init__(self, latents: Memory, time: Tensor) -> None:
        self.latents, self.time = latents, time

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        """Return the attention (b, h, l, k) over picture x (b, 3h, l, k) and memory, times the scale."""
        heads: Tensor = block(x, self.latents, self.time)
        return heads * adapter_scale
