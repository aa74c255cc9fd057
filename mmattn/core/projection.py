"""Projection of a memory to keys and values by head, and attention of query heads over them.

Which layout of keys and values is used (padded, packed or absorbed) is chosen by size, in `layouts`; `project` computes
keys and values once where many queries follow one another.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.attention import all_finite, attend_checked, combine_masks, visible_rows, visible_slots
from mmattn.core.kv import KeyValue, pack, real_slots_first
from mmattn.core.layouts import absorbing_pays, packed_lengths
from mmattn.core.masks import Mask, causal as causal_mask
from mmattn.core.parts import KeyValueParts, attend_parts
from mmattn.core.positions import Rotary
from mmattn.core.tracing import autocast, may_read, readable
from mmattn.errors import ConfigError, ShapeError, check_bool_mask


class KeyValueProjection(nn.Module):
    """Keys and values of a memory (b, m, e) by head, and attention of queries (b, h, l, k) over them.

    K = M Wk and V = M Wv (arXiv 1706.03762, section 3.2.2), with what `CrossAttention` adds to them: normalised or
    rotated keys, a null slot, a bias by `scores`.

    Args:
        k_proj: linear layer e to g·k.
        v_proj: linear layer from the width of the values to g·k.
        num_heads: h.
        num_kv_heads: g, dividing h.
        head_dim: k.
        memory_dim: e.
        value_dim: width of `values` where they differ from the memory, e by default.
        k_norm: norm of each head's keys.
        rotary: rotary positions of the keys, at `memory_positions`.
        null_slot: a learned slot in front of every row.
        length_norm: C of arXiv 2410.10450, as in `CrossAttention`.
        score_bias: a learned temperature times `scores` is added to the attention scores.
        score_mean: as in `CrossAttention`.
        score_std: as in `CrossAttention`.
        dropout: probability of dropping a weight in training.
        scale: of the scores, 1/√k by default.
        backend: as in `attend`.

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
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        memory_dim: int,
        value_dim: int | None = None,
        k_norm: nn.RMSNorm | None = None,
        rotary: Rotary | None = None,
        null_slot: bool = False,
        length_norm: float | None = None,
        score_bias: bool = False,
        score_mean: float = 0.0,
        score_std: float = 1.0,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.memory_dim, self.value_dim = memory_dim, memory_dim if value_dim is None else value_dim
        self.length_norm, self.dropout, self.backend = length_norm, dropout, backend
        self.score_mean, self.score_std = score_mean, score_std
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.k_proj, self.v_proj = k_proj, v_proj
        self.k_norm = k_norm
        self.rotary = rotary
        # On the device and in the dtype of the projections.
        like: dict[str, Any] = {"device": k_proj.weight.device, "dtype": k_proj.weight.dtype}
        self.score_scale = nn.Parameter(torch.ones((), **like)) if score_bias else None
        self.null_key = nn.Parameter(torch.randn(num_kv_heads, head_dim, **like) * 0.02) if null_slot else None
        self.null_value = nn.Parameter(torch.zeros(num_kv_heads, head_dim, **like)) if null_slot else None
        # Nothing but two matrices: keys, values and scores need no further step.
        self._plain = k_norm is None and rotary is None and not (null_slot or score_bias)

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

    def project(
        self,
        memory: Tensor,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        memory_positions: Tensor | None = None,
        absorb: bool = False,
        queries: int | None = None,
    ) -> KeyValue:
        """Keys and values of a memory, computed once, to be given to `forward` in its place.

        Args:
            memory: (b, m, e).
            values: (b, m, value_dim) where they are not the memory itself.
            mask: (b, m) bool, the padding.
            scores: (b, m), with `score_bias`.
            memory_positions: (m,) or (b, m), for `rotary`; counted from 0 by default.
            absorb: hold the memory itself instead, shared between layers, and project queries and results; less to
                read once K and V of all layers are larger than the memory.
            queries: how many will attend to each row, where it is for one call only: the layout is that which is the
                cheapest for so many. By default there are many, in many calls.

        Raises:
            ConfigError: `absorb` where keys are normalised, rotated, joined by a null slot, or values are given.
            ConfigError: `scores` without `score_bias`, or the other way round.
            MaskError: a mask that is not bool.
            ShapeError: sizes that do not fit.
        """
        mask = self._check(memory, values, mask, scores, None)
        if absorb and not (self.absorbable and values is None):
            raise ConfigError("keys normalised, rotated, or with a null slot or values of their own cannot be absorbed")
        kv = self._prepare(memory, values, mask, scores, memory_positions, 0 if absorb else queries, packable=True)
        seen = _rows_that_see(kv)
        if queries is not None:
            return replace(kv, seen=seen)
        finite = readable(kv.keys) and all_finite(kv.keys, kv.values)
        if kv.absorbed:
            return replace(kv, finite=finite, seen=seen)
        return replace(kv, keys=kv.keys.contiguous(), values=kv.values.contiguous(), finite=finite, seen=seen)

    def projecting_parameters(self) -> list[Tensor]:
        """The weights that `project` uses."""
        own = [self.null_key, self.null_value, self.score_scale] if self._parameters else []
        weights: list[Tensor] = [weight for weight in own if weight is not None]
        for layer in (self.k_proj, self.v_proj, self.k_norm):
            if layer is not None:
                # Asked at every step of decoding: `parameters()` takes longer than the list itself.
                weights += (
                    layer.parameters()
                    if layer._modules
                    else [one for one in layer._parameters.values() if one is not None]
                )
        return weights

    @property
    def absorbable(self) -> bool:
        """Whether keys are a plain matrix times the memory, so that it may be applied to the query instead."""
        plain = type(self.k_proj) is nn.Linear and type(self.v_proj) is nn.Linear
        return plain and self.k_norm is None and self.rotary is None and self.null_key is None

    def attend(
        self,
        q: Tensor,
        memory: Tensor | KeyValue | KeyValueParts,
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
        if isinstance(memory, KeyValueParts):
            if not (mask is scores is values is memory_positions is attention_mask is None) or causal:
                raise ShapeError("parts of a memory hold their masks: give no mask, scores, values or positions")
            return attend_parts(self, q, memory, return_weights)
        if isinstance(memory, KeyValue):
            if not (mask is scores is values is memory_positions is None):
                raise ShapeError(
                    "a projected memory holds its mask, scores, values and positions: give them to project"
                )
            mask, memory_rows, m = memory.mask, memory.batch, memory.slots
            if memory.plain and rows == memory_rows and attention_mask is None and not (causal or return_weights):
                return self._attend_padded(q, memory.keys, memory.values, None, None), None, None
        else:
            mask = self._check(memory, values, mask, scores, q.device)
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
            if self._plain and allowed is values is None and not (return_weights or self._absorbing(queries, memory)):
                # The common case, nothing special asked for: as few steps as the operations themselves.
                return self._attend_padded(q, *self.keys_and_values(self.cast(memory)), None, None), None, None
            if attention_mask is not None and allowed is not None:
                mask = visible_slots(allowed, memory_rows, m)
            packable = attention_mask is None and not return_weights
            kv = self._prepare(memory, values, mask, scores, memory_positions, queries, packable)
        out, weights, _ = self.attend_projected(q, kv, allowed, attention_mask is not None, return_weights)
        return out, weights, allowed

    def cast(self, tensor: Tensor) -> Tensor:
        """A tensor in the dtype of the weights; under autocast as it is."""
        wanted = self.k_proj.weight.dtype
        if tensor.dtype is wanted or autocast(tensor):
            return tensor
        return tensor.to(wanted)

    def heads(self, projected: Tensor) -> Tensor:
        """(b, m, n·k) to (b, n, m, k) for any number n of heads, a view."""
        rows, length, width = projected.shape
        return projected.view(rows, length, width // self.head_dim, self.head_dim).transpose(1, 2)

    def keys_and_values(
        self, memory: Tensor, values: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (b, g, m, k) of the slots of a memory in the dtype of the weights, without a null slot.

        Args:
            memory: (b, m, e).
            values: (b, m, value_dim) where they are not the memory itself.
            positions: (m,) or (b, m), needed with `rotary`.
        """
        keys = self.heads(self.k_proj(memory))
        if self.k_norm is not None:
            keys = norm_heads(self.k_norm, keys)
        if self.rotary is not None:
            keys = self.rotary(keys, positions)
        return keys, self.heads(self.v_proj(memory if values is None else values))

    def join(
        self,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        bias: Tensor | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> KeyValue:
        """Keys and values as one object, with the null slot in front where there is one.

        Args:
            keys: (b, g, m, k), or packed (1, g, n, k).
            values: likewise.
            mask: (b, m) bool, which slots are real; None where all are.
            bias: as `score_bias` gives it; packed (1, n) where the keys are.
            lengths: as `packed_lengths` gives them, for packed keys.
        """
        if self.null_key is None or self.null_value is None:
            return KeyValue(keys, values, mask, bias, lengths)
        b = keys.shape[0]
        keys = torch.cat([self.null_key[None, :, None].to(keys.dtype).expand(b, -1, -1, -1), keys], 2)
        values = torch.cat([self.null_value[None, :, None].to(values.dtype).expand(b, -1, -1, -1), values], 2)
        return KeyValue(keys, values, mask, None if bias is None else F.pad(bias, (1, 0)), null=True)

    def score_bias(self, scores: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """What the `scores` (b, m) of a memory add to the attention scores of its slots, (b, m).

        Args:
            scores: (b, m), or None without `score_bias`.
            mask: (b, m) bool; what scores masked slots have changes nothing.
        """
        if scores is None or self.score_scale is None:
            return None
        scores = (scores - self.score_mean) / self.score_std
        clean = scores if mask is None else scores.masked_fill(~mask, 0)
        return self.score_scale * clean.to(self.score_scale.dtype)

    def packed_lengths(self, mask: Tensor | None) -> tuple[int, ...] | None:
        """Number of real slots of each row where leaving out the padding of `mask` (b, m) pays, else None."""
        if self.null_key is not None:
            return None
        return packed_lengths(mask, 2 * self.memory_dim * self.num_kv_heads * self.head_dim)

    def _check(
        self,
        memory: Tensor,
        values: Tensor | None,
        mask: Tensor | None,
        scores: Tensor | None,
        device: torch.device | None,
    ) -> Tensor | None:
        """Refuse what does not fit; the mask of the slots that may be seen, None where all may."""
        if not isinstance(memory, Tensor) or memory.dim() != 3 or memory.shape[2] != self.memory_dim:
            given = tuple(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
            raise ShapeError(f"memory must be a tensor (b, m, {self.memory_dim}), got {given}")
        if device is not None and memory.device != device:
            raise ShapeError(f"x is on {device} and memory on {memory.device}: move one with .to()")
        if values is not None or self.value_dim != self.memory_dim:
            wanted = (*memory.shape[:2], self.value_dim)
            if values is None or tuple(values.shape) != wanted:
                offered = "none" if values is None else f"{tuple(values.shape)}"
                raise ShapeError(f"values must be (b, m, {self.value_dim}) = {wanted}, got {offered}")
        if mask is not None and check_bool_mask("mask", mask).shape != memory.shape[:2]:
            raise ShapeError(
                f"mask must be (b, m) = {tuple(memory.shape[:2])}, got {tuple(mask.shape)}; a mask over queries (l, m) "
                "is called attention_mask"
            )
        if (scores is None) != (self.score_scale is None):
            raise ConfigError(
                "this layer has no score_bias, so it takes no scores"
                if self.score_scale is None
                else "this layer has score_bias=True: give it scores (b, m)"
            )
        if scores is not None:
            if scores.shape != memory.shape[:2]:
                raise ShapeError(f"scores must be (b, m) = {tuple(memory.shape[:2])}, got {tuple(scores.shape)}")
            # Times the temperature, -inf would be NaN in its gradient, and +inf if it is negative.
            scored = scores != float("-inf")
            mask = scored if mask is None else mask & scored
        return None if mask is None or (may_read(mask) and bool(mask.all())) else mask

    def _absorbing(self, queries: int, memory: Tensor, lengths: tuple[int, ...] | None = None) -> bool:
        """Whether `queries` queries per row of a memory (b, m, e) or packed (1, n, e) cost less absorbed."""
        m = memory.shape[1] if lengths is None else sum(lengths) / max(len(lengths), 1)
        return absorbing_pays(
            queries,
            m,
            memory.shape[0],
            memory.element_size() < 4,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dim=self.memory_dim,
        )

    def _prepare(
        self,
        memory: Tensor,
        values: Tensor | None,
        mask: Tensor | None,
        scores: Tensor | None,
        memory_positions: Tensor | None,
        queries: int | None,
        packable: bool,
    ) -> KeyValue:
        """Choose a layout for a memory that `queries` queries per row attend to (None: very many)."""
        memory, values = self.cast(memory), None if values is None else self.cast(values)
        if memory_positions is None and self.rotary is not None:
            memory_positions = torch.arange(memory.shape[1], device=memory.device)
        bias = self.score_bias(scores, mask)
        lengths = self.packed_lengths(mask) if packable else None
        absorb = values is None and self.absorbable and queries is not None
        absorb = absorb and self._absorbing(queries or 0, memory, lengths)
        if mask is not None and lengths is not None:
            first = real_slots_first(mask, lengths)
            if absorb and first:
                # Each row is read up to its length, where it lies.
                raw = memory[:, None]
                return KeyValue(raw, raw, mask, bias, lengths, absorbed=True)
            if memory_positions is not None and self.rotary is not None:
                width = () if self.rotary.axes == 1 else (self.rotary.axes,)
                memory_positions = pack(memory_positions.expand(*mask.shape, *width), mask, lengths, first)
            memory = pack(memory, mask, lengths, first)
            values = None if values is None else pack(values, mask, lengths, first)
            bias = None if bias is None else pack(bias, mask, lengths, first)
        elif mask is not None:
            memory = memory.masked_fill(~mask[..., None], 0)
            values = None if values is None else values.masked_fill(~mask[..., None], 0)
        if absorb:
            raw = memory[:, None]
            return KeyValue(raw, raw, mask, bias, lengths, absorbed=True)
        return self.join(*self.keys_and_values(memory, values, memory_positions), mask, bias, lengths)

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
        g, n = self.num_kv_heads, self.num_heads // self.num_kv_heads
        contain = per_query and not kv.finite
        if kv.absorbed:
            q = _per_head(q, self.k_proj.weight.view(g, self.head_dim, -1))
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
            found = self._attend_padded(q, kv.keys, kv.values, allowed, bias, *asked, known)
        else:
            found = self._attend_by_row(q, kv, allowed if per_query else None, contain, return_weights, return_total)
        out, *extras = found if isinstance(found, tuple) else (found,)
        weights = extras[0] if return_weights else None
        total = extras[-1] if return_total else None
        if kv.absorbed:
            out = _per_head(out, self.v_proj.weight.view(g, self.head_dim, -1).transpose(1, 2))
            if self.v_proj.bias is not None:
                out = out + self.v_proj.bias.view(g, 1, -1).repeat_interleave(n, 0)
        if seen is not None:
            out = out.masked_fill(~seen, 0)
            weights = None if weights is None else weights.masked_fill(~seen, 0)
        if weights is not None and kv.null:
            weights = weights[..., 1:]
        return out, weights, total

    def _attend_padded(
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
            found = self._attend_padded(own, keys, values, rule, bias, contain, return_weights, return_total)
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


def _rows_that_see(kv: KeyValue) -> Tensor | bool | None:
    """Which rows have a slot that may be seen, (b, 1, 1, 1); True where all have, None where it cannot be read."""
    if kv.mask is None:
        return True
    seen = kv.mask.any(1)[:, None, None, None]
    return True if may_read(seen) and bool(seen.all()) else seen


def norm_heads(norm: nn.RMSNorm, heads: Tensor) -> Tensor:
    """Queries or keys (b, h, l, k) normalised, in their dtype."""
    # Autocast does not know RMSNorm, which warns of weights of another dtype.
    if heads.dtype is norm.weight.dtype:
        return norm(heads)
    return norm(heads.to(norm.weight.dtype)).to(heads.dtype)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x (b, h, l, i) times the weight (g, i, o) of each head: (b, h, l, o), reading a weight once for all rows."""
    b, h, l, _ = x.shape
    g, i, o = weight.shape
    n = h // g * l
    grouped = x.reshape(b, g, n, i).transpose(0, 1).reshape(g, b * n, i)
    return (grouped @ weight).view(g, b, n, o).transpose(0, 1).reshape(b, h, l, o)
