"""Attention over a memory in parts, one of which many rows share, or which lie in several processes.

Each part is attended to by itself and the results are merged exactly, so that nothing is copied or gathered: rows that
share a part are its queries (Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.core.attention import combine_masks
from mmattn.core.distributed import gather, sum_gradients, summed
from mmattn.core.kv_cache import KeyValue
from mmattn.core.log_sum_exp import merge
from mmattn.errors import ConfigError


@dataclass(frozen=True)
class KeyValueParts:
    """Keys and values of a memory in parts, attended to as if they lay one after the other.

    Args:
        parts: each with the rule (b, h or 1, l, m) bool of which of its slots each query may look at; None for all that
            are real. The rows of a part divide those of the queries.
        group: of `torch.distributed`, where each process has parts of its own and all have the same queries.
    """

    parts: tuple[tuple[KeyValue, Tensor | None], ...]
    group: Any = None


def attend_parts(
    projection: Any, q: Tensor, memory: KeyValueParts, return_weights: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention of queries over all parts.

    Args:
        projection: `KeyValueProjection`, whose keys and values they are.
        q: (b, h, l, k), queries.
        memory: the parts.
        return_weights: also return the weights.

    Returns:
        The output (b, h, l, k), with 0 where nothing may be seen; the weights (b, h, l, m) where asked for; and which
        queries see anything, (b, h, l, 1) bool.

    Raises:
        ConfigError: weights over what lies in several processes.
    """
    rows, group = q.shape[0], memory.group
    if group is not None and return_weights:
        raise ConfigError("the weights over a memory that lies in several processes are in none of them: use one")
    asking = q if group is None else sum_gradients(q, group)
    outs, weights, totals = [], [], []
    count = torch.zeros(1, 1, 1, 1, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    for part, rule in memory.parts:
        kv = part.without_null()
        allowed = combine_masks(kv.mask, rule, (rows, kv.batch, q.shape[1], q.shape[2], kv.slots))
        out, shown, total = projection.attend_projected(
            asking, kv, allowed, rule is not None, return_weights, return_total=True
        )
        outs.append(out)
        weights.append(shown)
        totals.append(total)
        count = count + _slots_seen(kv, allowed, rows).to(count)
    if projection.null_key is not None and projection.length_norm is not None:
        count = count if group is None else summed(count.expand(rows, -1, q.shape[2], 1), group)
        size = math.log(projection.length_norm) - count.clamp(min=1).log()
        totals = [total + size for total in totals]
    out, total = merge(outs, totals)
    if group is not None:
        out, total = merge(gather(out, group), gather(total, group))
    seen = total != float("-inf")
    # Once, whatever the number of parts.
    out, total = with_null_slot(projection, q, out, total)
    if not return_weights:
        return out.masked_fill(~seen, 0), None, seen
    shares = [(own - total).exp().masked_fill(~seen, 0) for own in totals]
    shown = torch.cat([(share * own).to(own.dtype) for share, own in zip(shares, weights, strict=True)], -1)
    return out.masked_fill(~seen, 0), shown, seen


def _slots_seen(kv: KeyValue, allowed: Tensor | None, rows: int) -> Tensor:
    """How many slots each query sees, broadcastable to (rows, h, l, 1)."""
    if allowed is None:
        return torch.full((1, 1, 1, 1), kv.slots)
    number = allowed.expand(*allowed.shape[:3], kv.slots).sum(-1, keepdim=True)
    return number if len(number) in (1, rows) else number.repeat_interleave(rows // len(number), 0)


def with_null_slot(projection: Any, q: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over slots and the null slot, where there is one, of what was found over the slots alone.

    Args:
        projection: `KeyValueProjection`, whose null slot it is.
        q: (b, h, l, k), queries.
        out: (b, h, l, k), over the slots.
        total: (b, h, l, 1), the log-sum-exp of their scores.
    """
    if projection.null_key is None:
        return out, total
    key, value = (_by_head(projection, one) for one in (projection.null_key, projection.null_value))
    score = (q.to(total.dtype) * key.to(total.dtype)).sum(-1, keepdim=True) * projection.scale
    return merge([out, value.to(out.dtype).expand_as(out)], [total, score])


def _by_head(projection: Any, heads: Tensor) -> Tensor:
    """A vector for each key/value head (g, k) as one for each head (h, 1, k)."""
    return heads.repeat_interleave(projection.num_heads // projection.num_kv_heads, 0)[:, None]
