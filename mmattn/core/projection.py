"""`KeyValueProjection`: keys and values of a memory by head, and attention of query heads over them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.attention import AttentionOutput, Options, Rule, attend_by_rule, concatenate
from mmattn.core.attention_inputs import (
    additive_mask,
    check_beams,
    combine_masks,
    join_causal,
    repeat_rows,
    visible_rows,
    visible_slots,
    zero_hidden,
)
from mmattn.core.key_values import KeyValue, absorbing_pays, pack, real_slots_first
from mmattn.core.masks import Mask
from mmattn.core.positions import Rotary
from mmattn.core.tracing import all_finite, autocast, may_read
from mmattn.errors import ConfigError, ShapeError, check_bool_mask

# Packing costs a kernel launch per row: it pays once it saves about this many multiplications per row.
PACK_SAVES = 2_000_000


@dataclass(slots=True)
class Slots:
    """A memory before its projection, and what belongs to each of its slots."""

    memory: Tensor  # (b, m, e)
    mask: Tensor | None = None  # (b, m) bool, the padding
    scores: Tensor | None = None  # (b, m), with `score_bias`
    positions: Tensor | None = None  # (m,) or (b, m), for `rotary`; counted from 0 by default
    lengths: tuple[int, ...] | None = None  # number of real slots of each row, where a mask may be read without a wait

    def real_first(self) -> bool:
        """Return whether all real slots come before the padding."""
        assert self.mask is not None and self.lengths is not None
        return real_slots_first(self.mask, self.lengths)

    def packed(self, rotary: Rotary | None) -> Slots:
        """Return the real slots of all rows one after the other, (1, n, …)."""
        mask, lengths, positions = self.mask, self.lengths, self.positions
        assert mask is not None and lengths is not None
        if positions is not None and rotary is not None:
            positions = positions.expand(*mask.shape, *(() if rotary.axes == 1 else (rotary.axes,)))
        first = self.real_first()
        scores, positions = (
            None if one is None else pack(one, mask, lengths, first) for one in (self.scores, positions)
        )
        return Slots(pack(self.memory, mask, lengths, first), mask, scores, positions, lengths)

    def rows_with_slots(self) -> Tensor | bool:
        """Return which rows have real slots, (b, 1, 1, 1), or True where all are known to."""
        if self.mask is None or (self.lengths is not None and all(self.lengths)):
            return True
        return self.mask.any(1)[:, None, None, None]


#: Dtypes of weights that are computed with as they are stored.
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether the weight of a layer may be read: a `Linear` that is its weight times its input, and no more.

    Hooks bring in weights that are offloaded or stored in 8 bits only while the layer runs: call the layer instead.
    """
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.dtype in _COMPUTED
        and layer.weight.device.type != "meta"
        and not (layer._forward_pre_hooks or layer._forward_hooks or "forward" in layer.__dict__)
    )


_OPEN = Rule(visible=True)


class AttendableMemory(ABC):
    """A memory that is no single tensor: in parts, in rows of their own, or searched."""

    @abstractmethod
    def attend(self, projection: KeyValueProjection, q: Tensor, return_weights: bool) -> AttentionOutput:
        """Return the attention of queries (b, h, l, k) over this memory."""


#: What queries can attend to.
Attended = Tensor | KeyValue | AttendableMemory


class KeyValueProjection(nn.Module):
    """Keys and values of a memory (b, m, e) by head, and attention of queries (b, h, l, k) over them.

    K = M Wk and V = M Wv (arXiv 1706.03762, section 3.2.2). Arguments without a line are those of `CrossAttention`.

    Args:
        k_proj: linear layer e to g·k.
        v_proj: linear layer e to g·k.
        num_heads: h.
        num_kv_heads: g.
        head_dim: k.
        memory_dim: e.
        k_norm: of the keys of a head.
        rotary: rotary positions of keys.
        needs_visible: who attends sets rows without a real slot to 0, and asks which they are.

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
        needs_visible: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.memory_dim, self.needs_visible = memory_dim, needs_visible
        self.length_norm, self.dropout, self.backend = length_norm, dropout, backend
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.score_mean, self.score_std = score_mean, score_std
        self.k_proj, self.v_proj = k_proj, v_proj
        self.k_norm = k_norm
        self.rotary = rotary
        like: dict[str, Any] = {"device": k_proj.weight.device, "dtype": k_proj.weight.dtype}
        self.score_scale = nn.Parameter(torch.ones((), **like)) if score_bias else None
        self.null_key = nn.Parameter(torch.randn(num_kv_heads, head_dim, **like) * 0.02) if null_slot else None
        self.null_value = nn.Parameter(torch.zeros(num_kv_heads, head_dim, **like)) if null_slot else None
        # Nothing but two matrices: keys, values and scores need no further step.
        self.is_plain = k_norm is None and rotary is None and not (null_slot or score_bias)

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
        for row, (queries, (keys, values, bias)) in enumerate(zip(q.split(beams), kv.rows(), strict=True)):
            rule = _OPEN if bias is None else Rule(bias=bias)
            if allowed is not None:
                slots = allowed[row * beams : (row + 1) * beams]
                rule = Rule(slots[..., kv.mask[row]], bias, contain=not kv.finite)
            result = attend_by_rule(queries, keys, values, rule, options)
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

    def project(
        self,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        memory_positions: Tensor | None = None,
        queries: int | None = None,
        hidden_are_zero: bool = False,
    ) -> KeyValue:
        """Compute keys and values of a memory once, to be given to `forward` in its place; see `lay_out`."""
        slots = self.checked(Slots(memory, mask, scores, memory_positions))
        kv = self.lay_out(slots, queries, hidden_are_zero=hidden_are_zero)
        keys, values, finite = kv.keys, kv.values, False
        if queries is None and may_read(keys):  # kernels of other devices read keys of any strides
            keys, values, finite = keys.contiguous(), values.contiguous(), all_finite(keys, values)
        visible = slots.rows_with_slots() if kv.additive is None else kv.visible
        return replace(kv, keys=keys, values=values, visible=visible, finite=finite)

    def lay_out(
        self, slots: Slots, queries: int | None, packable: bool = True, hidden_are_zero: bool = False
    ) -> KeyValue:
        """Choose a layout for checked slots that `queries` queries per row attend to (None: very many)."""
        mask, positions = slots.mask, slots.positions
        lengths = slots.lengths if packable and self.packs(slots.lengths, slots.memory.shape[1]) else None
        if self.rotary is None:
            positions = None
        elif positions is None:
            positions = torch.arange(slots.memory.shape[1], device=slots.memory.device)
        bias = None if slots.scores is None else self.score_bias(slots.scores, mask)
        slots = Slots(self.cast(slots.memory), mask, bias, positions, lengths)
        absorb = queries is not None and self.absorbs(queries, slots.memory, lengths)
        if lengths is not None:
            # Absorbed rows whose padding comes last are read up to their lengths, where they lie.
            slots = slots if absorb and slots.real_first() else slots.packed(self.rotary)
        elif mask is not None and not hidden_are_zero:  # the values of padding may be NaN
            slots.memory = zero_hidden(slots.memory, mask[..., None])
        additive: Tensor | None = None
        visible: Tensor | bool | None = None
        zero = (self.v_proj.bias is None or self.needs_visible) and bias is None and self.null_key is None
        if zero and mask is not None and lengths is None and not may_read(mask):
            additive = additive_mask(mask, slots.memory.dtype)[:, None, None]
            visible = slots.rows_with_slots() if self.needs_visible else None
        if absorb:
            raw = slots.memory[:, None]
            return KeyValue(raw, raw, mask, slots.scores, lengths, True, visible=visible, additive=additive)
        kv = self.join(*self.keys_and_values(slots.memory, slots.positions), mask, slots.scores, lengths)
        if additive is None:
            return kv
        return replace(kv, visible=visible, additive=additive.to(kv.keys.dtype))

    def keys_and_values(self, memory: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute keys and values (b, g, m, k) of slots in the dtype of the weights, without a null slot."""
        keys = self.heads(self.k_proj(memory))
        if self.k_norm is not None:
            keys = norm_heads(self.k_norm, keys)
        if self.rotary is not None:
            keys = self.rotary(keys, positions)
        return keys, self.heads(self.v_proj(memory))

    def join(
        self, keys: Tensor, values: Tensor, mask: Tensor | None, bias: Tensor | None, lengths: tuple[int, ...] | None
    ) -> KeyValue:
        """Return keys and values as one object, with the null slot in front where there is one."""
        if self.null_key is None or self.null_value is None:
            return KeyValue(keys, values, mask, bias, lengths)
        b = keys.shape[0]
        keys = torch.cat([self.null_key[None, :, None].to(keys.dtype).expand(b, -1, -1, -1), keys], 2)
        values = torch.cat([self.null_value[None, :, None].to(values.dtype).expand(b, -1, -1, -1), values], 2)
        return KeyValue(keys, values, mask, None if bias is None else F.pad(bias, (1, 0)), null=True)

    def score_bias(self, scores: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the bias (b, m) that the `scores` (b, m) of a memory add; scores of masked slots change nothing."""
        if self.score_scale is None:
            return None
        scores = (scores - self.score_mean) / self.score_std
        clean = scores if mask is None else scores.masked_fill(~mask, 0)
        return self.score_scale * clean.to(self.score_scale.dtype)

    def packs(self, lengths: Sequence[int] | None, slots: int) -> bool:
        """Return whether packing rows of these numbers of real slots pays, out of so many with padding."""
        if lengths is None or self.null_key is not None:
            return False
        saved = (len(lengths) * slots - sum(lengths)) * 2 * self.memory_dim * self.num_kv_heads * self.head_dim
        return saved > PACK_SAVES * len(lengths)

    def projecting_parameters(self) -> list[Tensor]:
        """Return the weights that `project` uses."""
        weights = [self.null_key, self.null_value, self.score_scale]
        for layer in (self.k_proj, self.v_proj, self.k_norm):
            if layer is not None:
                # Read at each step of decoding, and `parameters()` is slow to begin.
                weights += layer.parameters() if layer._modules else layer._parameters.values()
        return [weight for weight in weights if weight is not None]

    @property
    def is_linear(self) -> bool:
        """True if keys and values of a slot are a plain matrix times the slot."""
        return self.k_norm is None and self.rotary is None and all(map(is_plain_linear, (self.k_proj, self.v_proj)))

    def absorbs(self, queries: int, memory: Tensor, lengths: tuple[int, ...] | None = None) -> bool:
        """Return whether `queries` queries per row of a memory cost less absorbed."""
        # Only keys that are a plain matrix times the memory, which may be applied to the query instead.
        if not self.is_linear or self.null_key is not None:
            return False
        rows, m, e = memory.shape
        mean = m if lengths is None else sum(lengths) / max(len(lengths), 1)
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        return absorbing_pays(queries, mean, rows, memory.element_size() < 4, dim=e, heads=heads)

    def cast(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the dtype of the weights; under autocast, and for quantised weights, as it is."""
        dtype = self.k_proj.weight.dtype
        as_it_is = tensor.dtype is dtype or dtype not in _COMPUTED or autocast(tensor)
        return tensor if as_it_is else tensor.to(dtype)

    def heads(self, projected: Tensor) -> Tensor:
        """View (b, m, n·k) as (b, n, m, k) for any number n of heads."""
        rows, length, width = projected.shape
        return projected.view(rows, length, width // self.head_dim, self.head_dim).transpose(1, 2)

    def to_slots(self, q: Tensor) -> Tensor:
        """Multiply queries (b, h, l, k) with Wk: (b, h, l, e), whose products with slots are those of q with keys.

        The bias of the keys, which adds the same to all slots, is left out.
        """
        return per_head(q, self.k_proj.weight.view(self.num_kv_heads, self.head_dim, -1))

    def from_slots(self, output: Tensor) -> Tensor:
        """Multiply means of slots (b, h, l, e) with Wv: the means of their values, (b, h, l, k)."""
        g = self.num_kv_heads
        output = per_head(output, self.v_proj.weight.view(g, self.head_dim, -1).transpose(1, 2))
        if self.v_proj.bias is None:
            return output
        return output + self.v_proj.bias.view(g, 1, -1).repeat_interleave(self.num_heads // g, 0)

    def checked(self, slots: Slots, device: torch.device | None = None) -> Slots:
        """Refuse slots that do not fit; a mask without effect becomes None, and scores of -inf are masked."""
        memory, mask = slots.memory, slots.mask
        self._check_memory(memory, device)
        if mask is not None and check_bool_mask("mask", mask).shape != memory.shape[:2]:
            raise ShapeError(
                f"mask must be (b, m) = {tuple(memory.shape[:2])}, got {tuple(mask.shape)}; a mask over queries (l, m) "
                "is called attention_mask"
            )
        if slots.scores is not None or self.score_scale is not None:
            scored = self._scored(slots.scores, memory)
            mask = scored if mask is None else mask & scored
        lengths: tuple[int, ...] | None = None
        if mask is not None and may_read(mask):
            lengths = tuple(mask.sum(1).tolist())
            if sum(lengths) == mask.numel():
                mask = lengths = None
        return Slots(memory, mask, slots.scores, slots.positions, lengths)

    def _check_memory(self, memory: Tensor, device: torch.device | None) -> None:
        if not isinstance(memory, Tensor) or memory.dim() != 3 or memory.shape[2] != self.memory_dim:
            actual = tuple(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
            raise ShapeError(f"memory must be a tensor (b, m, {self.memory_dim}), got {actual}")
        if device is not None and memory.device != device:
            raise ShapeError(f"x is on {device} and memory on {memory.device}: move one with .to()")

    def _scored(self, scores: Tensor | None, memory: Tensor) -> Tensor:
        """Return the slots whose score is above -inf."""
        if self.score_scale is None:
            raise ConfigError("this layer has no score_bias, so it takes no scores")
        if scores is None:
            raise ConfigError("this layer has score_bias=True: give it scores (b, m)")
        if scores.shape != memory.shape[:2]:
            raise ShapeError(f"scores must be (b, m) = {tuple(memory.shape[:2])}, got {tuple(scores.shape)}")
        # Times the temperature, -inf would be NaN in its gradient, and +inf if it is negative.
        return scores != float("-inf")


def norm_heads(norm: nn.RMSNorm, heads: Tensor) -> Tensor:
    """Normalise queries or keys (b, h, l, k), in their dtype."""
    # Autocast does not know RMSNorm, which warns of weights of another dtype.
    if heads.dtype is norm.weight.dtype:
        return norm(heads)
    return norm(heads.to(norm.weight.dtype)).to(heads.dtype)


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (b, h, l, i) with the weight (g, i, o) of each head: (b, h, l, o), reading it once for all rows."""
    b, h, l, _ = x.shape
    g, i, o = weight.shape
    n = h // g * l
    grouped = x.reshape(b, g, n, i).transpose(0, 1).reshape(g, b * n, i)
    return (grouped @ weight).view(g, b, n, o).transpose(0, 1).reshape(b, h, l, o)
