"""Attention over the slots that a search finds for each query, of a memory that is too large to attend to whole.

With a = q Wk the query of a head in the space of the memory M, its scores over all slots are a Mᵀ: a search in M finds
the largest of them for each token and head, and the softmax runs over what was found (Unlimiformer, arXiv 2305.01625,
section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.core.split_attention import with_null_slot
from mmattn.errors import ConfigError

# Numbers of found slots that are looked at together.
_TOGETHER = 1 << 24


@dataclass(frozen=True)
class SearchedSlots:
    """A memory of which each query sees the slots that a search finds for it.

    Args:
        search: from queries (b, n, e) in the space of the slots to their rows in the memory (b, n, c); -1 is none. It
            is not differentiated.
        read: from rows (n,) to their slots (n, e).
        scores: from rows (n,) to the scores (b, n) of their slots, where there are any; b divides that of the queries.
        length: M, slots of the memory.
    """

    search: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]
    scores: Callable[[Tensor], Tensor] | None
    length: int


def attend_found(
    projection: Any, q: Tensor, memory: SearchedSlots, return_weights: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention of queries over the slots that are found for them, and the null slot.

    Args:
        projection: `KeyValueProjection`, whose keys and values they become.
        q: (b, h, l, k), queries.
        memory: what is searched.
        return_weights: also return the weights.

    Returns:
        The output (b, h, l, k), with 0 where nothing was found; the weights (b, h, l, M) where asked for, 0 for what
        was not found; and which queries found anything, (b, h, l, 1) bool.

    Raises:
        ConfigError: keys that are no plain matrix times a slot, or scores without `score_bias` or the other way round.
    """
    if not projection.is_linear:
        raise ConfigError(
            "a memory is searched with queries in its own space, which normalised or rotated keys do not allow: use an "
            "adapter without qk_norm and rotary positions"
        )
    if (memory.scores is None) != (projection.score_scale is None):
        raise ConfigError("a searched memory has scores where the layer has score_bias=True, and none elsewhere")
    b, h, length, _ = q.shape
    asked = projection.to_slots(q).flatten(1, 2)
    with torch.no_grad():
        rows = memory.search(asked.detach())
    step = max(1, _TOGETHER // max(1, b * rows.shape[2] * asked.shape[2]))
    found = [
        _attend(projection, some, own, memory, return_weights)
        for some, own in zip(asked.split(step, 1), rows.split(step, 1), strict=True)
    ]
    out, total, *more = (torch.cat(one, 1).unflatten(1, (h, length)) for one in zip(*found, strict=True))
    out = projection.from_slots(out)
    seen = total != float("-inf")
    own = total
    if projection.null_key is not None:
        if projection.k_proj.bias is not None:  # the same for all slots, but not for the null slot
            g = projection.num_kv_heads
            bias = projection.k_proj.bias.view(g, 1, -1).repeat_interleave(h // g, 0)
            own = own + (q * bias).sum(-1, keepdim=True).to(own.dtype) * projection.scale
        if projection.length_norm is not None:
            own = own + math.log(projection.length_norm) - math.log(max(memory.length, 1))
    out, total = with_null_slot(projection, q, out, own)
    out = out.masked_fill(~seen, 0)
    if not return_weights:
        return out, None, seen
    places = rows.unflatten(1, (h, length))
    weights = (more[0] * (own - total).exp().masked_fill(~seen, 0).to(more[0].dtype)).masked_fill(places < 0, 0)
    dense = weights.new_zeros(b, h, length, memory.length)
    return out, dense.scatter_add_(3, places.clamp(min=0), weights) if memory.length else dense, seen


def _attend(
    projection: Any, asked: Tensor, rows: Tensor, memory: SearchedSlots, return_weights: bool
) -> tuple[Tensor, ...]:
    """Output (b, n, e), log-sum-exp (b, n, 1) and weights (b, n, c) of queries (b, n, e) over their slots (b, n, c)."""
    b, n, e = asked.shape
    real = rows >= 0
    # Tokens and heads find much the same: each slot is read once.
    different, places = rows.clamp(min=0).unique(return_inverse=True)
    slots = projection.cast(memory.read(different))[places].reshape(b * n, 1, rows.shape[2], e)
    bias = None
    if memory.scores is not None:
        scores = memory.scores(different)
        scores = scores.repeat_interleave(b // len(scores), 0).gather(1, places.flatten(1)).view(places.shape)
        bias = projection.score_bias(scores, real).reshape(b * n, 1, 1, rows.shape[2])
    found = projection.attend_slots(
        asked.reshape(b * n, 1, 1, e),
        slots,
        slots,
        real.reshape(b * n, 1, 1, rows.shape[2]),
        bias,
        return_weights=return_weights,
        return_total=True,
    )
    out, *extras = found
    parts = (out, extras[-1], *extras[:-1])
    return tuple(one.reshape(b, n, one.shape[3]) for one in parts)
