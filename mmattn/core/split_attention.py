"""Attention over a memory in parts: shared by many rows, split over processes, or split by rows.

Each part is attended to separately and the results are merged exactly, so nothing is copied or gathered: rows that
share a part become its queries (Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mmattn.core.attention import AttentionOutput, concatenate, merge
from mmattn.core.attention_inputs import repeat_rows
from mmattn.core.key_values import KeyValue
from mmattn.core.projection import AttendableMemory, KeyValueProjection
from mmattn.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class KeyValueParts(AttendableMemory):
    """Keys and values of a memory in parts, attended to as if they lay one after the other."""

    parts: tuple[KeyValue, ...]  # their rows divide those of the queries
    # of `torch.distributed`, where each process has parts of its own and all have the same queries
    group: ProcessGroup | None = None

    def attend(self, projection: KeyValueProjection, q: Tensor, return_weights: bool) -> AttentionOutput:
        if self.group is not None and return_weights:
            raise ConfigError("no process has the weights over a memory that is split over processes: use one")
        queries = q if self.group is None else _SumGradients.apply(q, self.group)
        options = projection.options(return_weights, return_log_sum_exp=True)
        masks = [None if kv.mask is None else kv.mask[:, None, None] for kv in self.parts]
        results = [
            projection.attend_projected(queries, kv.without_null(), mask, False, options)
            for kv, mask in zip(self.parts, masks, strict=True)
        ]
        size = self._length_norm(projection, q)
        totals = [one.log_sum_exp + size for one in results if one.log_sum_exp is not None]
        output, total = merge([one.output for one in results], totals)
        if self.group is not None:
            output, total = merge(_Gather.apply(output, self.group), _Gather.apply(total, self.group))
        visible = total != float("-inf")
        # The null slot counts once, whatever the number of parts.
        output, total = with_null_slot(projection, q, output, total)
        whole = AttentionOutput(output.masked_fill(~visible, 0), None, total, visible)
        if return_weights:
            shares = [(one - total).exp().masked_fill(~visible, 0) for one in totals]
            weights = [one.weights for one in results if one.weights is not None]
            whole.weights = torch.cat([(by * one).to(one.dtype) for by, one in zip(shares, weights, strict=True)], -1)
        return whole

    def _length_norm(self, projection: KeyValueProjection, q: Tensor) -> Tensor | float:
        """Return what `length_norm` adds to the scores of all slots."""
        if projection.null_key is None or projection.length_norm is None:
            return 0.0
        count = torch.zeros(len(q), 1, 1, 1, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        for kv in self.parts:
            slots = kv.slots if kv.mask is None else repeat_rows(kv.mask.sum(1)[:, None, None, None], len(q))
            count = count + slots
        count = count if self.group is None else summed(count, self.group)
        return math.log(projection.length_norm) - count.clamp(min=1).log()


@dataclass(frozen=True)
class KeyValueRows(AttendableMemory):
    """Keys and values of several rows, computed apart: each row attends to its own, and nothing is copied or padded."""

    rows: tuple[KeyValue, ...]  # a `KeyValue` of one row for each row

    def attend(self, projection: KeyValueProjection, q: Tensor, return_weights: bool) -> AttentionOutput:
        """Return the attention of each row of queries (b, h, l, k) over its own keys and values."""
        results = [
            projection.attend(row, kv, return_weights=return_weights)
            for row, kv in zip(q.split(1), self.rows, strict=True)
        ]
        if return_weights:
            longest = max(kv.slots for kv in self.rows)
            for one, kv in zip(results, self.rows, strict=True):
                if one.weights is not None:
                    one.weights = F.pad(one.weights, (0, longest - kv.slots))
        return concatenate(results)


def with_null_slot(
    projection: KeyValueProjection, q: Tensor, output: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the null slot, where there is one, to attention over slots alone."""
    if projection.null_key is None or projection.null_value is None:
        return output, log_sum_exp
    # A vector for each key/value head (g, k) as one for each head (h, 1, k).
    heads = projection.num_heads // projection.num_kv_heads
    key, value = (one.repeat_interleave(heads, 0)[:, None] for one in (projection.null_key, projection.null_value))
    score = (q.to(log_sum_exp.dtype) * key.to(log_sum_exp.dtype)).sum(-1, keepdim=True) * projection.scale
    return merge([output, value.to(output.dtype).expand_as(output)], [log_sum_exp, score])


def summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all processes, without gradients."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor


class _SumGradients(torch.autograd.Function):
    """A tensor that is the same in each process; its gradients are summed (arXiv 1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """The tensor of each process, of one shape in all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
        ctx.rank = dist.get_rank(group)
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor, group=group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[ctx.rank], None
