"""`KeyValueProjection`: attention of query heads over a memory, or over keys and values that were computed before."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.attention import AttentionOutput, Options, Rule, attend_by_rule, concatenate
from mmattn.core.attention_inputs import (
    check_beams,
    combine_masks,
    join_causal,
    repeat_rows,
    visible_rows,
    visible_slots,
)
from mmattn.core.key_value_heads import KeyValueHeads, Slots
from mmattn.core.kv_cache import KeyValue
from mmattn.core.masks import Mask
from mmattn.errors import ShapeError

_OPEN = Rule(visible=True)


class AttendableMemory(ABC):
    """A memory that is no single tensor: in parts, in rows of their own, or searched."""

    @abstractmethod
    def attend(self, projection: KeyValueProjection, q: Tensor, return_weights: bool) -> AttentionOutput:
        """Return the attention of queries (b, h, l, k) over this memory."""


#: What queries can attend to.
Attended = Tensor | KeyValue | AttendableMemory


class KeyValueProjection(KeyValueHeads):
    """Keys and values of a memory (b, m, e) by head, and attention of queries (b, h, l, k) over them.

    Args:
        k_proj: linear layer e to g·k.
        v_proj: linear layer e to g·k.
        head_dim: k.
        length_norm: C of arXiv 2410.10450, as in `CrossAttention`.
        dropout: probability of dropping a weight in training.
        scale: of the scores, 1/√k by default.
        backend: as in `attend`.
        heads: the other settings of `KeyValueHeads`.

    >>> projection = KeyValueProjection(
    ...     nn.Linear(24, 16), nn.Linear(24, 16), num_heads=4, num_kv_heads=2, head_dim=8, memory_dim=24
    ... )
    >>> q, kv = torch.randn(2, 4, 5, 8), projection.project(torch.randn(2, 7, 24))
    >>> projection(q, kv).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(
        self,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        *,
        head_dim: int,
        length_norm: float | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str | None = None,
        **heads: Any,
    ) -> None:
        super().__init__(k_proj, v_proj, head_dim=head_dim, **heads)
        self.length_norm, self.dropout, self.backend = length_norm, dropout, backend
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale

    def forward(
        self, q: Tensor, memory: Attended, *, mask: Tensor | None = None, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the attention (b, h, l, k) of queries (b, h, l, k), in their dtype; 0 where a row sees nothing."""
        slots = Slots(memory, mask) if isinstance(memory, Tensor) else memory
        queries = q if q.dtype is self.k_proj.weight.dtype else self.cast(q)
        result = self.attend(queries, slots, return_weights=return_weights)
        output = result.output if result.output.dtype is q.dtype else result.output.to(q.dtype)
        return output if result.weights is None else (output, result.weights)

    def attend(
        self,
        q: Tensor,
        memory: Attended | Slots,
        *,
        attention_mask: Tensor | Mask | None = None,
        causal: bool = False,
        return_weights: bool = False,
    ) -> AttentionOutput:
        """Attend from projected queries (b, h, l, k) to a memory, with the arguments of `CrossAttention.forward`."""
        per_query = causal or attention_mask is not None
        if isinstance(memory, KeyValue):
            if memory.plain and q.shape[0] == memory.batch and not (per_query or return_weights):
                return attend_by_rule(q, memory.keys, memory.values, _OPEN, self.options())
            allowed = self._allowed(q, memory.mask, attention_mask, causal, (memory.batch, memory.slots))
            return self.attend_projected(q, memory, allowed, per_query, self.options(return_weights))
        if not isinstance(memory, AttendableMemory):
            slots = memory if isinstance(memory, Slots) else Slots(memory)
            return self._attend_slots(q, slots, attention_mask, causal, return_weights)
        if per_query:
            raise ShapeError(f"{type(memory).__name__} holds its own masks: give no attention_mask and no causal")
        return memory.attend(self, q, return_weights)

    def _attend_slots(
        self, q: Tensor, slots: Slots, attention_mask: Tensor | Mask | None, causal: bool, return_weights: bool
    ) -> AttentionOutput:
        """Project a memory in the layout that is cheapest for these queries, and attend to it."""
        slots = self.checked(slots, q.device)
        rows, m, _ = slots.memory.shape
        allowed = self._allowed(q, slots.mask, attention_mask, causal, (rows, m))
        queries = q.shape[0] * q.shape[2] // max(rows, 1)
        plain = self.is_plain and allowed is None and not return_weights
        if plain and not self.absorbs(queries, slots.memory):
            # The common case, nothing special asked for: as few steps as the operations themselves.
            return attend_by_rule(q, *self.keys_and_values(self.cast(slots.memory)), _OPEN, self.options())
        per_query = causal or attention_mask is not None
        if per_query and allowed is not None:
            slots.mask, slots.lengths = visible_slots(allowed, rows, m), None
        kv = self.lay_out(slots, queries, packable=not (per_query or return_weights))
        return self.attend_projected(q, kv, allowed, per_query, self.options(return_weights))

    def options(self, return_weights: bool = False, return_log_sum_exp: bool = False) -> Options:
        """Return the settings of this layer for one attention."""
        dropout = self.dropout if self.training else 0.0
        return Options(self.scale, dropout, self.backend, False, return_weights, return_log_sum_exp)

    def _allowed(
        self, q: Tensor, mask: Tensor | None, attention_mask: Tensor | Mask | None, causal: bool, sizes: tuple[int, int]
    ) -> Tensor | None:
        """Return all masks together, broadcastable to (b, h, l, m), for a memory of sizes (b, m)."""
        (rows, _, l, _), (memory_rows, m) = q.shape, sizes
        if rows != memory_rows:
            check_beams("x", rows, memory_rows)
        if causal:
            attention_mask = join_causal(attention_mask, l, m, q.device)
        if attention_mask is not None:
            return combine_masks(mask, attention_mask, (rows, memory_rows, self.num_heads, l, m))
        if mask is None:
            return None if m else torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=q.device)
        return mask[:, None, None]

    def attend_projected(
        self, q: Tensor, kv: KeyValue, allowed: Tensor | None, per_query: bool, options: Options
    ) -> AttentionOutput:
        """Attend from q (rows, h, l, k) under all masks, which may say more than the padding of `kv` (`per_query`)."""
        queries = self.to_slots(q) if kv.absorbed else q
        if kv.lengths is not None:
            result = self._attend_by_row(queries, kv, allowed if per_query else None, options)
        else:
            result = attend_by_rule(queries, kv.keys, kv.values, self._rule(kv, allowed, per_query), options)
        if kv.absorbed:
            result.output = self.from_slots(result.output)
        if kv.null or (kv.absorbed and self.v_proj.bias is not None and kv.additive is None):
            # Neither the bias of the values nor the null slot is for queries without visible slots.
            visible = visible_rows(allowed, q.shape[0], kv.slots, per_head=True, device=q.device)
            if visible is not None:
                result.fill(~visible, 0, float("-inf"))
            result.visible = visible
        if kv.null and result.weights is not None:
            result.weights = result.weights[..., 1:]
        return result

    def _rule(self, kv: KeyValue, allowed: Tensor | None, per_query: bool) -> Rule:
        """Return the rule over keys and values that are not packed."""
        bias = None if kv.bias is None else kv.bias[:, None, None]
        contain = per_query and not kv.finite
        if not kv.null:
            return Rule(allowed, bias, contain) if per_query else Rule(allowed, bias, contain, kv.visible, kv.additive)
        bias = self._with_length_norm(bias, allowed, kv)
        return Rule(None if allowed is None else F.pad(allowed, (1, 0), value=True), bias, contain)

    def _attend_by_row(self, q: Tensor, kv: KeyValue, allowed: Tensor | None, options: Options) -> AttentionOutput:
        """Attend from each row to its own real slots; nothing is computed on padding."""
        assert kv.mask is not None
        beams = q.shape[0] // kv.batch
        if allowed is not None:
            allowed = repeat_rows(allowed, q.shape[0]).expand(q.shape[0], *allowed.shape[1:])
        results = []
        for row, (own, (keys, values, bias)) in enumerate(zip(q.split(beams), kv.rows(), strict=True)):
            rule = _OPEN if bias is None else Rule(bias=bias)
            if allowed is not None:
                slots = allowed[row * beams : (row + 1) * beams]
                rule = Rule(slots[..., kv.mask[row]], bias, contain=not kv.finite)
            result = attend_by_rule(own, keys, values, rule, options)
            if result.weights is not None:
                weights = result.weights.new_zeros(*result.weights.shape[:3], kv.slots)
                weights[..., kv.mask[row]] = result.weights
                result.weights = weights
            results.append(result)
        return concatenate(results)

    def _with_length_norm(self, bias: Tensor | None, allowed: Tensor | None, kv: KeyValue) -> Tensor | None:
        """Add log C − log M to the M slots that each query sees, and nothing to the null slot: (b, 1, 1, 1 + m)."""
        if self.length_norm is None:
            return bias
        if allowed is None:
            allowed = torch.ones(1, 1, 1, kv.slots, dtype=torch.bool, device=kv.keys.device)
        visible = allowed.expand(*allowed.shape[:3], kv.slots).sum(-1, keepdim=True).clamp(min=1)
        size = math.log(self.length_norm) - visible.to(kv.keys.dtype).log()
        size = F.pad(size.expand(*size.shape[:3], kv.slots), (1, 0))
        return size if bias is None else size + (bias if size.shape[0] == 1 else repeat_rows(bias, size.shape[0]))
