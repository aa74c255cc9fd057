"""Attention of query heads over a memory, or over the keys and values that were computed of it before."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.attention import attend_checked, combine_masks, visible_rows, visible_slots
from mmattn.core.key_value_heads import KeyValueHeads
from mmattn.core.kv_cache import KeyValue
from mmattn.core.masks import Mask, causal as causal_mask
from mmattn.core.per_row_attention import KeyValueRows, attend_rows
from mmattn.core.split_attention import KeyValueParts, attend_parts
from mmattn.core.top_k_attention import SearchedSlots, attend_found
from mmattn.errors import ShapeError

#: What may be attended to.
Attended = Tensor | KeyValue | KeyValueParts | KeyValueRows | SearchedSlots
#: How a memory is attended to that lies in parts, in rows apart, or is searched.
_FORMS: dict[type, Any] = {KeyValueParts: attend_parts, KeyValueRows: attend_rows, SearchedSlots: attend_found}


class KeyValueProjection(KeyValueHeads):
    """Keys and values of a memory (b, m, e) by head, and attention of queries (b, h, l, k) over them.

    Args:
        k_proj: linear layer e to g·k.
        v_proj: linear layer from the width of the values to g·k.
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
        self, q: Tensor, memory: Tensor | KeyValue, *, mask: Tensor | None = None, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention output (b, h, l, k) of queries (b, h, l, k), in their dtype; exactly 0 where a row sees nothing.

        Args:
            q: (b, h, l, k).
            memory: (b, m, e), or what `project` gives for it.
            mask: (b, m) bool, the padding of a memory that is not projected.
            return_weights: also return the weights (b, h, l, m).
        """
        out, weights, _ = self.attend(self.cast(q), memory, mask=mask, return_weights=return_weights)
        out = out if out.dtype is q.dtype else out.to(q.dtype)
        return out if weights is None else (out, weights)

    def attend(
        self,
        q: Tensor,
        memory: Attended,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        attention_mask: Tensor | Mask | None = None,
        scores: Tensor | None = None,
        causal: bool = False,
        memory_positions: Tensor | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attention of queries, already projected, over a memory or over what `project` gives for it.

        Args:
            q: (b, h, l, k); its rows may be a multiple of those of the memory (beams).
            memory: (b, m, e) or projected.
            values: (b, m, value_dim) where they are not the memory itself.
            mask: (b, m) bool, the padding.
            attention_mask: (l, m), (b, l, m) or (b, h, l, m) bool.
            scores: (b, m), with `score_bias`; a slot of score -inf is hidden.
            causal: query i may look at slots up to i + m - l.
            memory_positions: (m,) or (b, m), for `rotary`; counted from 0 by default.
            return_weights: also return the weights.

        Returns:
            The output (b, h, l, k), with 0 where nothing may be seen; the weights (b, h, l, m) where asked for; and all
            rules together, broadcastable to (b, h, l, m), None where everything may be seen.

        Raises:
            ConfigError: `scores` without `score_bias`, or the other way round.
            MaskError: a mask that is not bool.
            ShapeError: sizes or devices that do not fit.
        """
        rows, _, l, _ = q.shape
        if isinstance(memory, KeyValueParts | KeyValueRows | SearchedSlots):
            if not (mask is scores is values is memory_positions is attention_mask is None) or causal:
                raise ShapeError(
                    f"a memory given as {type(memory).__name__} holds its masks: give no mask, scores, values or "
                    "positions"
                )
            found: tuple[Tensor, Tensor | None, Tensor | None] = _FORMS[type(memory)](self, q, memory, return_weights)
            return found
        if isinstance(memory, KeyValue):
            if not (mask is scores is values is memory_positions is None):
                raise ShapeError(
                    "a projected memory holds its mask, scores, values and positions: give them to project"
                )
            mask, memory_rows, m = memory.mask, memory.batch, memory.slots
            if memory.plain and rows == memory_rows and attention_mask is None and not (causal or return_weights):
                return self.attend_slots(q, memory.keys, memory.values, None, None), None, None
        else:
            mask = self.check(memory, values, mask, scores, q.device)
            memory_rows, m = memory.shape[:2]
        if rows != memory_rows and (memory_rows == 0 or rows % memory_rows):
            raise ShapeError(
                f"rows of x must be those of the memory or a multiple of them (beams), got {rows} and {memory_rows}"
            )
        if causal:
            rule = causal_mask(l, m, offset=m - l, device=q.device)
            attention_mask = rule if attention_mask is None else rule & attention_mask
        allowed = None if m else torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=q.device)
        if attention_mask is None:
            allowed = allowed if mask is None else mask[:, None, None]
        else:
            allowed = combine_masks(mask, attention_mask, (rows, memory_rows, self.num_heads, l, m))
        if isinstance(memory, KeyValue):
            kv = memory
        else:
            queries = rows * l // max(memory_rows, 1)
            if self.is_plain and allowed is values is None and not (return_weights or self.absorbs(queries, memory)):
                # The common case, nothing special asked for: as few steps as the operations themselves.
                return self.attend_slots(q, *self.keys_and_values(self.cast(memory)), None, None), None, None
            if attention_mask is not None and allowed is not None:
                mask = visible_slots(allowed, memory_rows, m)
            packable = attention_mask is None and not return_weights
            kv = self.lay_out(memory, values, mask, scores, memory_positions, queries, packable)
        out, weights, _ = self.attend_projected(q, kv, allowed, attention_mask is not None, return_weights)
        return out, weights, allowed

    def attend_projected(
        self,
        q: Tensor,
        kv: KeyValue,
        allowed: Tensor | None,
        per_query: bool,
        return_weights: bool,
        return_total: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attention of q (rows, h, l, k) over keys and values: (rows, h, l, k), and what is asked for, else None.

        Args:
            allowed: all rules together.
            per_query: they say more than the padding of `kv` does.
        """
        rows = q.shape[0]
        contain = per_query and not kv.finite
        if kv.absorbed:
            q = self.to_slots(q)
        seen = None
        if kv.null or kv.absorbed:
            seen = visible_rows(allowed, rows, kv.slots, per_head=True, device=q.device)
        if kv.lengths is None:
            bias = None if kv.bias is None else kv.bias[:, None, None]
            if kv.null:
                bias = self._with_length_norm(bias, allowed, kv)
                allowed = None if allowed is None else F.pad(allowed, (1, 0), value=True)
                known = None
            else:
                known = None if per_query else kv.seen
            asked = contain, return_weights, return_total
            found = self.attend_slots(q, kv.keys, kv.values, allowed, bias, *asked, known)
        else:
            found = self._attend_by_row(q, kv, allowed if per_query else None, contain, return_weights, return_total)
        out, *extras = found if isinstance(found, tuple) else (found,)
        weights = extras[0] if return_weights else None
        total = extras[-1] if return_total else None
        if kv.absorbed:
            out = self.from_slots(out)
        if seen is not None:
            out = out.masked_fill(~seen, 0)
            weights = None if weights is None else weights.masked_fill(~seen, 0)
        if weights is not None and kv.null:
            weights = weights[..., 1:]
        return out, weights, total

    def attend_slots(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor | None,
        bias: Tensor | None,
        contain: bool = False,
        return_weights: bool = False,
        return_total: bool = False,
        seen: Tensor | bool | None = None,
    ) -> Any:
        """`attend_checked` with the settings of this layer."""
        return attend_checked(
            q,
            keys,
            values,
            allowed,
            bias,
            contain=contain,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
            return_weights=return_weights,
            return_total=return_total,
            seen=seen,
        )

    def _attend_by_row(
        self,
        q: Tensor,
        kv: KeyValue,
        allowed: Tensor | None,
        contain: bool,
        return_weights: bool,
        return_total: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        """Each row over its own real slots; nothing is computed on padding."""
        assert kv.mask is not None
        rows = q.shape[0]
        if allowed is not None:
            allowed = allowed.repeat_interleave(rows // allowed.shape[0], 0)
        parts: list[tuple[Tensor, ...]] = []
        step = rows // kv.batch
        for row, (own, (keys, values, bias)) in enumerate(zip(q.split(step), kv.rows(), strict=True)):
            rule = None if allowed is None else allowed[row * step : (row + 1) * step][..., kv.mask[row]]
            found = self.attend_slots(own, keys, values, rule, bias, contain, return_weights, return_total)
            out, *extras = found if isinstance(found, tuple) else (found,)
            if return_weights:
                full = extras[0].new_zeros(*extras[0].shape[:3], kv.slots)
                full[..., kv.mask[row]] = extras[0]
                extras[0] = full
            parts.append((out, *extras))
        joined = tuple(torch.cat(one) for one in zip(*parts, strict=True))
        return joined if len(joined) > 1 else joined[0]

    def _with_length_norm(self, bias: Tensor | None, allowed: Tensor | None, kv: KeyValue) -> Tensor | None:
        """`bias` (b, 1, 1, 1 + m) with log C − log M on the M slots each query sees, and nothing on the null slot."""
        if self.length_norm is None:
            return bias
        if allowed is None:
            allowed = torch.ones(1, 1, 1, kv.slots, dtype=torch.bool, device=kv.keys.device)
        seen = allowed.expand(*allowed.shape[:3], kv.slots).sum(-1, keepdim=True).clamp(min=1)
        size = math.log(self.length_norm) - seen.to(kv.keys.dtype).log()
        size = F.pad(size.expand(*size.shape[:3], kv.slots), (1, 0))
        if bias is None:
            return size
        return size + (bias if size.shape[0] == 1 else bias.repeat_interleave(size.shape[0] // bias.shape[0], 0))
