"""Keys and values of a host from those of another model by ridge regression, in closed form (arXiv 2608.03893).

With x (n, i) what the other model has cached of n tokens and y (n, k) the keys of a head of the host as they are at
position 0, or its values, both centred, W = (xᵀx + λ n I)⁻¹ xᵀy. Each head takes the λ of `PENALTIES`, with random
features of x (`CacheMap`) or without, that leave the least error on a tenth of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmattn.adapters.composed.augmenting_model import AugmentingModel
from mmattn.adapters.fused_cache.blocks import CacheMap

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
