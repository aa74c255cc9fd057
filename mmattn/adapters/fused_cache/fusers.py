"""Blocks that change keys and values of a host layer by those of another model: a trained network, or a fitted map.

The map is a ridge regression in closed form (arXiv 2608.03893). With x (n, i) what the other model has cached of n
tokens and y (n, k) the keys of a head of the host as they are at position 0, or its values, both centred,
W = (xᵀx + λ n I)⁻¹ xᵀy. Each head takes the λ of `PENALTIES`, with random features of x (`CacheMap`) or without, that
leave the least error on a tenth of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.composed.augmenting_model import AugmentingModel
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


PENALTIES = (1e-8, 1e-5, 1e-3, 1e-2)
#: Tokens of a regression, drawn from all prompts; padded tokens of a forward; tokens by which layers are chosen.
MOST, AT_ONCE, CHOOSING = 8192, 4096, 2048


def batches(ids: Tensor, real: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return prompts of similar lengths together, without rows of padding and columns that are padding in all."""
    ids, real = ids[real.any(1)], real[real.any(1)]
    parts = [(ids[some], real[some]) for some in real.sum(1).argsort().split(max(AT_ONCE // ids.shape[1], 1))]
    return [(some[:, mask.any(0)], mask[:, mask.any(0)]) for some, mask in parts]


def read_tokens(models: Sequence[AugmentingModel], ids: Tensor, real: Tensor) -> list[list[Tensor]]:
    """Return what each model caches in each layer (n, e) of the same tokens, drawn from prompts, in random order."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[list[list[Tensor]]] = [[] for _ in models]
    share = MOST / max(int(real.sum()), 1)
    for some, mask in batches(ids, real):
        chosen = mask.cpu() & (torch.rand(mask.shape, generator=generator, device="cpu") < share)
        for model, parts in zip(models, tokens, strict=True):
            parts.append([one[chosen.to(one.device)].float() for one in model.prefill(some, mask).states])
    order = torch.randperm(sum(len(part[0]) for part in tokens[0]), generator=generator, device="cpu")
    return [[torch.cat(layer)[order] for layer in zip(*parts, strict=True)] for parts in tokens]


def fit_maps(
    blocks: Mapping[int, CacheMap],
    layers: Mapping[int, int] | None,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> None:
    """Fit the map of each host layer, from the layer named for it or those that tell most of it."""
    ranks = rank_layers(sources, [targets[layer] for layer in blocks])
    for ranked, (layer, block) in zip(ranks, blocks.items(), strict=True):
        count = len(block.augmenting_layers)
        chosen = [layers[layer]] if layers is not None else ranked[torch.arange(count) % len(sources)].tolist()
        x = torch.cat([sources[number] for number in chosen], 1)
        block.center.copy_(x.mean(0))
        block.spread.copy_(x.std(0).clamp(min=1e-9))
        y = targets[layer].to(block.weight.device)
        weight, bias = ridge(block.features(x), y, block.head_widths, first=x.shape[1])
        block.weight.copy_(weight)
        block.bias.copy_(bias)
        block.augmenting_layers.copy_(torch.tensor(chosen))


def ridge(x: Tensor, y: Tensor, widths: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
    """Return weight (i, o) and bias (o,) of the regression of heads (n, o) on x (n, i), all or the `first` inputs."""
    x, y, held = x.double(), y.double(), max(len(x) // 10, 1)
    center, spread, mean = x.mean(0), x.std(0).clamp(min=1e-9), y.mean(0)
    x, y = (x - center) / spread, y - mean
    covariance, target = x[:-held].T @ x[:-held], x[:-held].T @ y[:-held]
    best, least = torch.zeros_like(target), torch.full((len(widths),), torch.inf).to(x)
    for size in {first, x.shape[1]}:
        for penalty in PENALTIES:
            weight = torch.zeros_like(target)
            weight[:size] = _solve(covariance[:size, :size], target[:size], penalty * len(x))
            squares = (x[-held:] @ weight - y[-held:]).square().sum(0)
            error = torch.stack([one.sum() for one in squares.split(list(widths))])
            better = (error < least).repeat_interleave(torch.tensor(widths, device=x.device))
            best, least = torch.where(better, weight, best), torch.minimum(error, least)
    weight = best / spread[:, None]
    return weight, mean - center @ weight


def rank_layers(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return for each target (n, o) the numbers of the sources (n, i), that which leaves the least error first.

    Each source is fitted to some random directions of all targets on half of the tokens and measured on the others.
    """
    generator, directions = torch.Generator().manual_seed(0), []
    for target in map(_standardise, targets):
        some = torch.randn(target.shape[1], 48, generator=generator, dtype=target.dtype, device="cpu")
        directions.append(target @ some.to(target.device))
    y, half, errors = torch.cat(directions, 1), len(directions[0]) // 2, []
    for x in map(_standardise, sources):
        x = x.to(y.device)
        weight = _solve(x[:half].T @ x[:half], x[:half].T @ y[:half], 1e-2 * half)
        errors.append((x[half:] @ weight - y[half:]).square().sum(0).unflatten(0, (len(targets), -1)).sum(1))
    return torch.stack(errors, 1).argsort(1)


def _standardise(x: Tensor) -> Tensor:
    x = x[:CHOOSING].double()
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-9)


def _solve(covariance: Tensor, target: Tensor, penalty: float) -> Tensor:
    identity = torch.eye(len(covariance)).to(covariance)
    return torch.cholesky_solve(target, torch.linalg.cholesky(covariance + penalty * identity))
