"""From a memory to keys and values by head, in the layout that suits its size.

Which layout is used (padded, packed or absorbed) is chosen in `layouts`; `project` computes keys and values once where
many queries follow one another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.attention import all_finite
from mmattn.core.kv_cache import KeyValue, pack, real_slots_first
from mmattn.core.layouts import absorbing_pays, packed_lengths
from mmattn.core.positions import Rotary
from mmattn.core.tracing import autocast, may_read, readable
from mmattn.errors import ConfigError, ShapeError, check_bool_mask


class KeyValueHeads(nn.Module):
    """Keys and values of a memory (b, m, e) by head: K = M Wk and V = M Wv (arXiv 1706.03762, section 3.2.2).

    With what `CrossAttention` adds to them: normalised or rotated keys, a null slot, a bias by `scores`.

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
        score_bias: a learned temperature times `scores` is added to the attention scores.
        score_mean: as in `CrossAttention`.
        score_std: as in `CrossAttention`.
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
        score_bias: bool = False,
        score_mean: float = 0.0,
        score_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.memory_dim, self.value_dim = memory_dim, memory_dim if value_dim is None else value_dim
        self.score_mean, self.score_std = score_mean, score_std
        self.k_proj, self.v_proj = k_proj, v_proj
        self.k_norm = k_norm
        self.rotary = rotary
        # On the device and in the dtype of the projections.
        like: dict[str, Any] = {"device": k_proj.weight.device, "dtype": k_proj.weight.dtype}
        self.score_scale = nn.Parameter(torch.ones((), **like)) if score_bias else None
        self.null_key = nn.Parameter(torch.randn(num_kv_heads, head_dim, **like) * 0.02) if null_slot else None
        self.null_value = nn.Parameter(torch.zeros(num_kv_heads, head_dim, **like)) if null_slot else None
        # Nothing but two matrices: keys, values and scores need no further step.
        self.is_plain = k_norm is None and rotary is None and not (null_slot or score_bias)

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
        mask = self.check(memory, values, mask, scores, None)
        if absorb and not (self.absorbable and values is None):
            raise ConfigError("keys normalised, rotated, or with a null slot or values of their own cannot be absorbed")
        kv = self.lay_out(memory, values, mask, scores, memory_positions, 0 if absorb else queries, packable=True)
        seen = _rows_that_see(kv)
        if queries is not None:
            return replace(kv, seen=seen)
        finite = readable(kv.keys) and all_finite(kv.keys, kv.values)
        if kv.absorbed:
            return replace(kv, finite=finite, seen=seen)
        return replace(kv, keys=kv.keys.contiguous(), values=kv.values.contiguous(), finite=finite, seen=seen)

    def projecting_parameters(self) -> list[Tensor]:
        """The weights that `project` uses."""
        weights = [self.null_key, self.null_value, self.score_scale]
        for layer in (self.k_proj, self.v_proj, self.k_norm):
            if layer is not None:
                # Asked at each step of decoding, and `parameters()` is slow to begin.
                weights += layer.parameters() if layer._modules else layer._parameters.values()
        return [weight for weight in weights if weight is not None]

    @property
    def is_linear(self) -> bool:
        """Whether keys and values of a slot are a plain matrix times the slot."""
        plain = type(self.k_proj) is nn.Linear and type(self.v_proj) is nn.Linear
        return plain and self.k_norm is None and self.rotary is None and self.value_dim == self.memory_dim

    @property
    def absorbable(self) -> bool:
        """Whether keys are a plain matrix times the memory, so that it may be applied to the query instead."""
        return self.is_linear and self.null_key is None

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

    def to_slots(self, q: Tensor) -> Tensor:
        """Queries (b, h, l, k) in the space of the slots, (b, h, l, e): their products with slots are those with keys.

        But for what a bias of the keys adds, the same for all slots.
        """
        return per_head(q, self.k_proj.weight.view(self.num_kv_heads, self.head_dim, -1))

    def from_slots(self, out: Tensor) -> Tensor:
        """A mean of slots (b, h, l, e) for each head as the same mean of their values, (b, h, l, k)."""
        g = self.num_kv_heads
        out = per_head(out, self.v_proj.weight.view(g, self.head_dim, -1).transpose(1, 2))
        if self.v_proj.bias is None:
            return out
        return out + self.v_proj.bias.view(g, 1, -1).repeat_interleave(self.num_heads // g, 0)

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

    def check(
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

    def absorbs(self, queries: int, memory: Tensor, lengths: tuple[int, ...] | None = None) -> bool:
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

    def lay_out(
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
        absorb = absorb and self.absorbs(queries or 0, memory, lengths)
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


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x (b, h, l, i) times the weight (g, i, o) of each head: (b, h, l, o), reading a weight once for all rows."""
    b, h, l, _ = x.shape
    g, i, o = weight.shape
    n = h // g * l
    grouped = x.reshape(b, g, n, i).transpose(0, 1).reshape(g, b * n, i)
    return (grouped @ weight).view(g, b, n, o).transpose(0, 1).reshape(b, h, l, o)
