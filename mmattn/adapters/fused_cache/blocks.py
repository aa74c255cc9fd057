"""Blocks that change keys and values of a host layer by those of another model: a trained network, or a map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.gated.block import Gate
from mmattn.adapters.protocols import HeadSizes


class CacheFuser(nn.Module):
    """The network that changes keys and values of one host layer."""

    def __init__(self, memory_dim: int, hidden_dim: int, gate: str, size: HeadSizes) -> None:
        super().__init__()
        self.key_dim, value_dim = size.head_dim, size.value_dim or size.head_dim
        self.num_kv_heads = size.num_kv_heads
        width = size.num_kv_heads * (size.head_dim + value_dim)
        self.host_norm, self.memory_norm = nn.LayerNorm(width), nn.LayerNorm(memory_dim)
        self.in_proj = nn.Linear(width + memory_dim, hidden_dim)
        self.out_proj = nn.Linear(hidden_dim, width)
        self.gate = Gate(2, size.num_kv_heads if gate == "head" else 1)

    def forward(self, key: Tensor, value: Tensor, states: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changes of keys and values, before the gates."""
        weight, hidden = self.in_proj.weight, ~visible[..., None]
        host = torch.cat([key, value], -1).transpose(1, 2).flatten(2).to(weight.dtype).masked_fill(hidden, 0)
        states = states.to(weight.device, weight.dtype).masked_fill(hidden, 0)
        inner = F.gelu(self.in_proj(torch.cat([self.host_norm(host), self.memory_norm(states)], -1)))
        change = self.out_proj(inner).masked_fill(hidden, 0).unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)
        return change[..., : self.key_dim], change[..., self.key_dim :]


#: Inputs of a regression where the cache of the other model is less than half as wide: the others are random features.
FEATURES = 1536


class CacheMap(nn.Module):
    """The map to keys and values of one host layer, from what the other model has cached in some of its layers.

    It is linear in states x (b, m, i), standardised, and in random features relu([x; 1] D) of them (NIPS 2007, Rahimi
    and Recht), so that its weights have a closed form.

    Args:
        memory_dim: e, keys and values of a layer of the other model; i is e times the layers that are read.
        num_layers: how many of its layers are read.
        size: of the host's attention.
    """

    center: Tensor  # (i,)
    spread: Tensor  # (i,)
    directions: Tensor  # D, (i + 1, f)
    weight: Tensor  # (i + f, o), to the keys of all heads and then their values
    bias: Tensor  # (o,)
    augmenting_layers: Tensor  # (num_layers,) int64, -1 before `fit`

    def __init__(self, memory_dim: int, num_layers: int, size: HeadSizes) -> None:
        super().__init__()
        self.heads, widths = size.num_kv_heads, (size.head_dim, size.value_dim or size.head_dim)
        #: Of the keys of each head, and of their values.
        self.head_widths = [width for width in widths for _ in range(self.heads)]
        inputs, outputs = num_layers * memory_dim, sum(self.head_widths)
        generator = torch.Generator().manual_seed(0)
        further = FEATURES - inputs if 2 * inputs < FEATURES else 0
        some = torch.randn(inputs + 1, further, generator=generator, device="cpu")
        some[:-1] *= 1.5 / inputs**0.5
        self.register_buffer("center", torch.zeros(inputs))
        self.register_buffer("spread", torch.ones(inputs))
        self.register_buffer("directions", some.to(self.center))
        self.register_buffer("weight", torch.zeros(inputs + some.shape[1], outputs))
        self.register_buffer("bias", torch.zeros(outputs))
        self.register_buffer("augmenting_layers", torch.full((num_layers,), -1))

    def gate(self) -> Tensor:
        """Return the share of keys and of values that are replaced (2, 1): all after `fit`, none before."""
        return (self.augmenting_layers[:1] >= 0).float().expand(2, 1)

    def features(self, states: Tensor) -> Tensor:
        """Return the inputs (…, i + f) of the linear map for states (…, i)."""
        x = (states.to(self.weight) - self.center) / self.spread
        return torch.cat([x, (x @ self.directions[:-1] + self.directions[-1]).relu()], -1)

    def map(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (b, g, m, k), as they are at position 0, and values (b, g, m, v) of states (b, m, i)."""
        mapped = self.features(states) @ self.weight + self.bias
        heads = mapped.split(self.head_widths, -1)
        return torch.stack(heads[: self.heads], 1), torch.stack(heads[self.heads :], 1)

    def forward(self, key: Tensor, value: Tensor, states: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return what must be added to keys and values to replace them."""
        hidden = ~visible[:, None, :, None]
        mapped_key, mapped_value = self.map(states.masked_fill(~visible[..., None], 0))
        return (mapped_key - key).masked_fill(hidden, 0), (mapped_value - value).masked_fill(hidden, 0)
