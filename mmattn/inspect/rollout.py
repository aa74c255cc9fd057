"""Attention rollout (arXiv 2005.00928, section 3): the share of each source in the states of the tokens.

The weights at a layer are what a token reads there; the states that it reads may have read the memory before. Rollout
multiplies the weights through the layers, half of every state being its residual: with the host's own weights A (l, l),
those of the memory C (l, s), each the mean over heads, and c the row sums of C

    at the host's attention   R ← ½ R + ½ A R
    at an adapter's block     R ← (1 - ½ c) R + ½ C

from R = 0. A row of R sums to 1 or less: the rest is the text itself. Gates and norms of values are left out, the
latter as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def roll_out(own: Sequence[Tensor], memory: Mapping[int, Tensor], before: bool = False) -> Tensor:
    """Shares (l, s) of the sources in the last states of the tokens.

    Args:
        own: A (l, l), the host's own weights at each of its layers.
        memory: C (l, s), the weights of the sources, by number of the host layer.
        before: whether the adapter's blocks come before their layer instead of after it.

    >>> own, memory = [torch.tensor([[1.0, 0.0], [0.5, 0.5]])] * 2, {0: torch.tensor([[0.8], [0.0]])}
    >>> roll_out(own, memory).tolist()  # the second token reads the source from the first
    [[0.4000000059604645], [0.10000000149011612]]
    """
    shares = torch.zeros_like(next(iter(memory.values())))
    for layer, weights in enumerate(own):
        if before:
            shares = _after_block(shares, memory.get(layer))
        shares = (shares + weights @ shares) / 2
        if not before:
            shares = _after_block(shares, memory.get(layer))
    return shares


def _after_block(shares: Tensor, weights: Tensor | None) -> Tensor:
    return shares if weights is None else (1 - weights.sum(-1, keepdim=True) / 2) * shares + weights / 2


def own_weights(model: nn.Module, **call: Any) -> list[Tensor] | None:
    """The host's own weights (l, l) at each layer in a call of one row, the mean over heads; None where it gives none.

    The host is left with the eager implementation of attention, which gives weights.

    Args:
        model: the adapted model.
        **call: its arguments.
    """
    implementation = getattr(getattr(model.host, "config", None), "_attn_implementation", None)
    change = getattr(model.host, "set_attn_implementation", None)
    if implementation is None or change is None:
        return None
    if implementation != "eager":
        change("eager")
    by_layer = getattr(model(**call, output_attentions=True), "attentions", None)
    if not by_layer or any(weights is None or weights.dim() != 4 for weights in by_layer):
        return None
    return [weights[0].float().mean(0).cpu() for weights in by_layer]
