"""Rollout: what reached a token from the memory, also by way of other tokens.

Attention at a layer says what a token read there; the states it reads may have read the memory before. Attention
rollout (arXiv 2005.00928, section 3) multiplies the weights through the layers, half of every state being what it was:
with the host's own weights A (l, l), those of the memory C (l, s), each the mean over heads, and c the row sums of C

    at the host's attention   R ← ½ R + ½ A R
    at an adapter's block     R ← (1 - ½ c) R + ½ C

from R = 0. A row of R sums to 1 or less: the rest is the text itself. Gates and the sizes of values are left out, as
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def roll_out(own: Sequence[Tensor], seen: Mapping[int, Tensor], before: bool = False) -> Tensor:
    """Shares (l, s) of the sources in the last states of the tokens.

    Args:
        own: the host's weights (l, l) at each of its layers. seen: those of the memory (l, s), by layer.
        before: whether blocks stand before their layer instead of after it.

    >>> own, seen = [torch.tensor([[1.0, 0.0], [0.5, 0.5]])] * 2, {0: torch.tensor([[0.8], [0.0]])}
    >>> roll_out(own, seen).tolist()  # the second token reads it from the first
    [[0.4000000059604645], [0.10000000149011612]]
    """
    reached = torch.zeros_like(next(iter(seen.values())))
    for layer, weights in enumerate(own):
        if before:
            reached = _read(reached, seen.get(layer))
        reached = (reached + weights @ reached) / 2
        if not before:
            reached = _read(reached, seen.get(layer))
    return reached


def _read(reached: Tensor, seen: Tensor | None) -> Tensor:
    return reached if seen is None else (1 - seen.sum(-1, keepdim=True) / 2) * reached + seen / 2


def own_weights(model: nn.Module, **call: Any) -> list[Tensor] | None:
    """The host's weights (l, l) at each layer in a call of one row, the mean over heads; None where it gives none.

    The host is left attending in the one way that gives weights.
    """
    kind = getattr(getattr(model.host, "config", None), "_attn_implementation", None)
    change = getattr(model.host, "set_attn_implementation", None)
    if kind is None or change is None:
        return None
    if kind != "eager":
        change("eager")
    found = getattr(model(**call, output_attentions=True), "attentions", None)
    if not found or any(weights is None or weights.dim() != 4 for weights in found):
        return None
    return [weights[0].float().mean(0).cpu() for weights in found]
