"""Attention over the slots that a search finds for each query, of a memory that is too large to attend to whole.

With a = q Wk the query of a head in the space of the memory M, its scores over all slots are a Mᵀ: a search in M finds
the largest of them for each token and head, and the softmax runs over these (Unlimiformer, arXiv 2305.01625, section
2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmattn.core.attention import AttentionOutput, Rule, attend_by_rule
from mmattn.core.projection import AttendableMemory, KeyValueProjection
from mmattn.core.split_attention import with_null_slot
from mmattn.errors import ConfigError

# Numbers of top-k slots that are read together.
_TOGETHER = 1 << 24


@dataclass(frozen=True)
class SearchedSlots(AttendableMemory):
    """A memory where each query attends to the slots that a search finds for it."""

    # from the projection of a layer and queries (b, n, e) in the space of the slots to their rows in the memory
    # (b, n, c); -1 is none. It is not differentiated
    search: Callable[[KeyValueProjection, Tensor], Tensor]
    read: Callable[[Tensor], Tensor]  # from rows (n,) to their slots (n, e)
    # from rows (n,) to the scores (b, n) of their slots, where there are any; b divides that of the queries
    scores: Callable[[Tensor], Tensor] | None
    length: int  # M, slots of the memory

    def attend(self, projection: KeyValueProjection, q: Tensor, return_weights: bool) -> AttentionOutput:
        """Return the attention of queries (b, h, l, k) over their top-k slots and the null slot."""
        self._check(projection)
        b, h, length, _ = q.shape
        queries = projection.to_slots(q).flatten(1, 2)
        with torch.no_grad():
            rows = self.search(projection, queries.detach())
        step = max(1, _TOGETHER // max(1, b * rows.shape[2] * queries.shape[2]))
        parts = [
            self._attend(projection, some, places, return_weights)
            for some, places in zip(queries.split(step, 1), rows.split(step, 1), strict=True)
        ]
        output, total, *weights = (torch.cat(one, 1).unflatten(1, (h, length)) for one in zip(*parts, strict=True))
        output, visible = projection.from_slots(output), total != float("-inf")
        slots_total = self._beside_null_slot(projection, q, total)
        output, total = with_null_slot(projection, q, output, slots_total)
        result = AttentionOutput(output.masked_fill(~visible, 0), visible=visible)
        if return_weights:
            places = rows.unflatten(1, (h, length))
            share = (slots_total - total).exp().masked_fill(~visible, 0).to(weights[0].dtype)
            shown = (weights[0] * share).masked_fill(places < 0, 0)
            dense = shown.new_zeros(b, h, length, self.length)
            result.weights = dense.scatter_add_(3, places.clamp(min=0), shown) if self.length else dense
        return result

    def _check(self, projection: KeyValueProjection) -> None:
        if not projection.is_linear:
            raise ConfigError(
                "a memory is searched with queries in its own space, which normalised or rotated keys do not allow: "
                "use an adapter without qk_norm and rotary positions"
            )
        if (self.scores is None) != (projection.score_scale is None):
            raise ConfigError("a searched memory needs scores with score_bias=True, and must not have them without")

    def _beside_null_slot(self, projection: KeyValueProjection, q: Tensor, total: Tensor) -> Tensor:
        """Return the log-sum-exp of the slots with the terms that only count beside a null slot."""
        if projection.null_key is None:
            return total
        if projection.k_proj.bias is not None:  # the same for all slots, but not for the null slot
            g, h = projection.num_kv_heads, projection.num_heads
            bias = projection.k_proj.bias.view(g, 1, -1).repeat_interleave(h // g, 0)
            total = total + (q * bias).sum(-1, keepdim=True).to(total.dtype) * projection.scale
        if projection.length_norm is not None:
            total = total + math.log(projection.length_norm) - math.log(max(self.length, 1))
        return total

    def _attend(
        self, projection: KeyValueProjection, queries: Tensor, rows: Tensor, return_weights: bool
    ) -> tuple[Tensor, ...]:
        """Return output (b, n, e), log-sum-exp and weights (b, n, c) of queries (b, n, e) over slots (b, n, c)."""
        b, n, e = queries.shape
        real = rows >= 0
        # Tokens and heads find much the same: each slot is read once.
        different, places = rows.clamp(min=0).unique(return_inverse=True)
        slots = projection.cast(self.read(different))[places].reshape(b * n, 1, rows.shape[2], e)
        bias = None
        if self.scores is not None:
            scores = self.scores(different)
            scores = scores.repeat_interleave(b // len(scores), 0).gather(1, places.flatten(1)).view(places.shape)
            bias = projection.score_bias(scores, real)
            bias = None if bias is None else bias.reshape(b * n, 1, 1, rows.shape[2])
        rule = Rule(real.reshape(b * n, 1, 1, rows.shape[2]), bias)
        options = projection.options(return_weights, return_log_sum_exp=True)
        result = attend_by_rule(queries.reshape(b * n, 1, 1, e), slots, slots, rule, options)
        parts = (result.output, result.log_sum_exp, result.weights)
        return tuple(one.reshape(b, n, one.shape[3]) for one in parts if one is not None)
