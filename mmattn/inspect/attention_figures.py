"""How an adapter looks at a memory: how sharply, how much at padding, how much at nothing. In figures by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.kv import KeyValue
from mmattn.hosts.adapted import AdaptedModel


@dataclass(frozen=True)
class Look:
    """Figures of one layer in one call, over the queries and heads that may look at something.

    Args:
        entropy: of the weights of real slots, in bits, over queries with a choice. uniform: what it would be if all
            slots that may be seen had the same weight; 0 where no query has a choice.
        padding: the largest share that slots out of sight get from a query.
        null: the mean share that goes to no slot: what a null slot takes.
    """

    entropy: float
    uniform: float
    padding: float
    null: float


def measure(weights: Tensor, allowed: Tensor) -> Look:
    """The figures of weights (b, h, l, m) and a rule that broadcasts to them.

    >>> measure(torch.tensor([[[[0.25, 0.25, 0.0], [1.0, 0.0, 0.0]]]]), torch.tensor([[[[True, True, False]]]]))
    Look(entropy=0.5, uniform=1.0, padding=0.0, null=0.25)
    """
    allowed = allowed.expand(weights.shape)
    hidden = weights.masked_fill(allowed, 0).sum(-1)
    seen = allowed.any(-1)
    shares = weights.masked_fill(~allowed, 0)
    total = shares.sum(-1)
    choice = allowed.sum(-1)
    shares = shares / total[..., None].clamp_min(1e-12)
    entropy = torch.special.entr(shares).sum(-1) / math.log(2)
    free = choice > 1
    return Look(
        entropy[free].mean().item() if free.any() else 0.0,
        choice[free].float().log2().mean().item() if free.any() else 0.0,
        hidden.max().item() if hidden.numel() else 0.0,
        (1 - total - hidden)[seen].mean().item() if seen.any() else 0.0,
    )


@contextmanager
def watch(model: AdaptedModel, name: str) -> Iterator[dict[int, Look]]:
    """Inside the block, the figures of one adapter by host layer, those of the last call; weights are not kept."""
    looks: dict[int, Look] = {}
    hooks = [
        attention.register_forward_hook(_Watcher(looks, layer), with_kwargs=True)
        for (owner, layer), attention in model.attentions().items()
        if owner == name
    ]
    try:
        yield looks
    finally:
        for hook in hooks:
            hook.remove()


class _Watcher:
    def __init__(self, looks: dict[int, Look], layer: int) -> None:
        self.looks, self.layer = looks, layer

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _, weights = attention.forward(*args, **{**kwargs, "return_weights": True})
        memory = args[1]
        mask = memory.mask if isinstance(memory, KeyValue) else kwargs.get("mask")
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=weights.device)
        if mask is not None:
            allowed = allowed & mask[:, None, None].to(weights.device)
        if kwargs.get("attention_mask") is not None:
            allowed = allowed & kwargs["attention_mask"].to(weights.device)
        self.looks[self.layer] = measure(weights.float(), allowed)
