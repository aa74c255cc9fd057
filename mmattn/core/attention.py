"""Scaled dot-product attention over a masked memory: the only attention softmax of the package.

softmax(q kᵀ / √k + bias) v (arXiv 1706.03762, equation 1; the scale is inside the softmax), with three departures: a
query that may attend to nothing gets exactly 0 and finite gradients; slots that a query may not attend to have no
influence on it, forward or backward; heads and beams that share keys and values are folded into the query length
instead of copying keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmattn.core.attention_inputs import (
    check_bias,
    check_heads,
    combine_masks,
    differs_by_query,
    hide_slots,
    join_causal,
    repeat_rows,
)
from mmattn.core.masks import Mask, causal as causal_mask
from mmattn.core.tracing import all_finite, autocast, may_read, transform_under_way
from mmattn.errors import check_choice, check_float

BACKENDS = ("sdpa", "eager")
# Slots up to which half precision with gradients goes through float32 on the CPU: its backward is twice as fast there.
_WIDEN_UP_TO = 320


@dataclass(slots=True)
class AttentionOutput:
    """Result of attention."""

    output: Tensor  # (b, h, l, v)
    weights: Tensor | None = None  # (b, h, l, m) before dropout, where they were requested
    # (b, h, l, 1) of the scores, where it was requested; -inf where no slot is visible
    log_sum_exp: Tensor | None = None
    # bool, broadcastable to (b, h, l, 1), queries that may attend to a slot; None where all may
    visible: Tensor | None = None

    def visible_queries(self) -> Tensor:
        """Return the queries (b, h, l, 1) that may attend to a slot."""
        sizes = (*self.output.shape[:3], 1)
        return self.output.new_ones(sizes, dtype=torch.bool) if self.visible is None else self.visible.expand(sizes)

    def fill(self, queries: Tensor, value: float, log_sum_exp: float) -> None:
        """Set output and weights of some queries, broadcastable to (b, h, l, 1), to a value."""
        self.output = self.output.masked_fill(queries, value)
        if self.weights is not None:
            self.weights = self.weights.masked_fill(queries, value)
        if self.log_sum_exp is not None:
            self.log_sum_exp = self.log_sum_exp.masked_fill(queries, log_sum_exp)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one attention."""

    scale: float  # factor of the scores
    dropout: float = 0.0  # probability of dropping a weight
    backend: str | None = None  # "sdpa", "eager", or None for the better one
    causal: bool = False  # query i may attend to slots up to i, for backends without a mask
    return_weights: bool = False  # also compute the weights
    return_log_sum_exp: bool = False  # also compute the log-sum-exp of the scores


@dataclass(frozen=True, slots=True)
class Rule:
    """Visible slots of each query, and a bias on the scores."""

    allowed: Tensor | None = None  # bool, broadcastable to (b, h, l, m), True = may attend; None allows every slot
    bias: Tensor | None = None  # float, broadcastable to (b, h, l, m), added to the scaled scores; -inf hides a slot
    contain: bool = False  # slots that some query may not attend to may hold NaN or infinity
    # (b, 1, 1, 1) bool, rows that may attend to a slot, or True for all of them; None where it is not known or
    # differs between the queries of a row
    visible: Tensor | bool | None = None
    # float, broadcastable to (b, h, l, m): `allowed` as it is added to the scores; values of other slots are 0
    additive: Tensor | None = None


#: Attention of q (b, h, l, k) over k (b, h, m, k) and v (b, h, m, v) under a mask: bool, True = may attend, or float.
Backend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Options], AttentionOutput]


def equation(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> AttentionOutput:
    """Compute softmax(scale · q kᵀ + mask) v step by step: the definition, and the backend called "eager".

    Scores are float32 at least: float16 would overflow, bfloat16 would lose accuracy that the fused kernel keeps.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False) if autocast(q) else nullcontext():
        scores = (q.to(wide) * options.scale) @ k.to(wide).transpose(-1, -2)
        if options.causal:
            mask = causal_mask(q.shape[2], k.shape[2], device=q.device).tensor
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        weights = scores.softmax(-1)
        output = F.dropout(weights, options.dropout, options.dropout > 0) @ v.to(wide)
        log_sum_exp = scores.logsumexp(-1, keepdim=True) if options.return_log_sum_exp else None
    return AttentionOutput(output.to(v.dtype), weights.to(v.dtype) if options.return_weights else None, log_sum_exp)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> AttentionOutput:
    """Call torch's fused kernel, which computes no weights: the backend called "sdpa"."""
    if mask is not None and mask.device.type == "cpu":
        # A CUDA kernel would copy the whole mask where its rows are not aligned, so there it stays small.
        mask = mask.expand(-1, -1, q.shape[2], k.shape[2])
    return AttentionOutput(
        F.scaled_dot_product_attention(q, k, v, mask, options.dropout, options.causal, scale=options.scale)
    )


def grouped_sdpa(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Call torch's fused kernel as transformers does, without a copy of k (b, g, m, k) for the heads that share it."""
    is_grouped = k.shape[1] != q.shape[1]
    output = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scaling, enable_gqa=is_grouped)
    return output.transpose(1, 2).contiguous(), None


def fused_with_log_sum_exp(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> AttentionOutput:
    """Call torch's fused kernel for the CPU, which returns the log-sum-exp too."""
    if mask is not None:
        mask = mask.expand(-1, -1, q.shape[2], k.shape[2])
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    output, log_sum_exp = FusedAttention.apply(q, k, v, mask, options.scale)
    return AttentionOutput(output, log_sum_exp=log_sum_exp)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    attention_mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention of queries over masked keys and values: (b, h, l, v).

    Args:
        q: (b, h, l, k). q may have a multiple of the rows of k and v (beams): row i of q then reads row i // multiple,
            without a copy.
        k: (b, g, m, k), where g divides h.
        v: (b, g, m, v).
        mask: (b, m) bool, True = may attend; the padding of k and v.
        attention_mask: (l, m), (b, l, m) or (b, h, l, m) bool or a `Mask`, True = may attend.
        bias: float, broadcastable to (b, h, l, m), added to the scaled scores; a query with -inf on every slot it may
            attend to gives 0.
        causal: query i may attend to keys up to i + m - l.
        scale: factor of the scores; 1/√k by default.
        dropout: probability of dropping a weight, from 0 to below 1.
        backend: "sdpa" (fused) or "eager" (scores in float32 at least, gives weights); chosen by default.
        return_weights: also return the weights (b, h, l, m) before dropout.

    NaN or infinity in a slot gives NaN in the queries that may attend to it, and in no others. If only some queries
    may, no gradient flows back from them.

    Raises:
        ConfigError: an unknown backend, or a dropout that is not a probability.
        MaskError: a mask that is not bool, or a bias that is.
        ShapeError: sizes, dtypes or devices that do not fit.

    >>> q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    >>> attend(q, k, k, mask=torch.tensor([[True] * 5, [False] * 5]))[1].abs().sum()
    tensor(0.)
    """
    # 1. Check.
    check_heads(q, k, v)
    check_bias(bias, (*q.shape[:3], k.shape[2]))
    check_float("dropout", dropout, at_least=0, below=1)
    if backend is not None:
        check_choice("backend", backend, BACKENDS)
    # 2. Combine the masks into one rule.
    (rows, h, l, width), (b, g, m, _) = q.shape, k.shape
    # The kernel's own causal rule holds where no queries are folded and there is no other rule.
    unmasked = (rows, h, l) == (b, g, m) and mask is attention_mask is bias is None and not return_weights
    kernel_is_causal = causal and unmasked
    if causal and not unmasked:
        attention_mask = join_causal(attention_mask, l, m, q.device)
    allowed = combine_masks(mask, attention_mask, (rows, b, h, l, m))
    k, v = hide_slots(allowed, k, v)
    rule = Rule(allowed, bias, contain=kernel_is_causal or differs_by_query(allowed, b))
    # 3. Choose a backend, and 4. set to 0 what may attend to nothing.
    scale = 1 / math.sqrt(width) if scale is None else scale
    options = Options(scale, dropout, backend, kernel_is_causal, return_weights)
    result = attend_by_rule(q, k, v, rule, options)
    return result.output if result.weights is None else (result.output, result.weights)


def attend_by_rule(q: Tensor, k: Tensor, v: Tensor, rule: Rule, options: Options) -> AttentionOutput:
    """Compute attention of checked q (b, h, l, k), k (b, g, m, k) and v (b, g, m, v) under one rule."""
    if not (q.shape[0] and q.shape[2] and k.shape[2]):
        return _over_nothing(q, k, v, options)
    if rule.contain and not (may_read(k) and all_finite(k, v)):
        return _contain(q, k, v, rule, options)
    return _over_finite_slots(q, k, v, rule, options)


def _over_finite_slots(q: Tensor, k: Tensor, v: Tensor, rule: Rule, options: Options) -> AttentionOutput:
    # 3. Choose a backend.
    backend = _choose_backend(q, k, v, rule, options)
    if backend is fused and options.backend is None and _is_faster_in_float32(q, k, v):
        with torch.autocast("cpu", enabled=False):
            result = _over_finite_slots(q.float(), k.float(), v.float(), rule, options)
        result.output = result.output.to(v.dtype)
        return result
    if rule.allowed is None and rule.bias is None and q.shape[:2] == k.shape[:2]:
        return backend(q, k, v, None, options)
    added = backend is fused and rule.additive is not None and rule.additive.dtype is q.dtype
    if added:
        mask, blind = rule.additive, None  # queries that may attend to nothing average zeros
    else:
        dtype = torch.promote_types(q.dtype, torch.float32) if backend is equation else q.dtype
        mask, blind = _merge(rule, q, k, dtype)
    result = backend(_fold(q, *k.shape[:2]), k, v, mask, options)
    # 4. Zero what saw nothing.
    if added:
        result.visible = rule.visible if isinstance(rule.visible, Tensor) else None
    elif blind is not None:
        result.fill(blind, 0, float("-inf"))
        result.visible = ~blind
    return result if q.shape[:2] == k.shape[:2] else _unfold_result(result, *q.shape[:2])


def _choose_backend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, options: Options) -> Backend:
    if options.return_weights or options.backend == "eager":
        return equation
    if options.backend is None and not torch.compiler.is_compiling() and transform_under_way() is not None:
        return equation  # torch's kernels have no rule for batches of batches, and no forward derivative
    if not options.return_log_sum_exp:
        return fused
    return equation if options.dropout or _needs_equation(q, k, v, rule.bias) else fused_with_log_sum_exp


def _needs_equation(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernel with a log-sum-exp does not take these tensors, or has no gradient for them."""
    same_kind = q.dtype is k.dtype is v.dtype and q.shape[3] == v.shape[3] and q.device.type == "cpu"
    return not same_kind or (bias is not None and bias.requires_grad and torch.is_grad_enabled())


def _is_faster_in_float32(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a backward pass in half precision on the CPU follows, over few slots."""
    if q.element_size() != 2 or q.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    # The length comes last: a traced graph would hold only for lengths of the same answer.
    return (q.requires_grad or k.requires_grad or v.requires_grad) and k.shape[2] <= _WIDEN_UP_TO


def _over_nothing(q: Tensor, k: Tensor, v: Tensor, options: Options) -> AttentionOutput:
    """Return sums of nothing: exactly 0 whatever the tensors hold, and the graph stays whole."""
    rows, h, l, _ = q.shape
    nothing = q.new_zeros(rows, h, l, v.shape[3]) + sum(tensor.reshape(-1)[:0].sum() for tensor in (q, k, v))
    weights = q.new_zeros(rows, h, l, k.shape[2]) if options.return_weights else None
    log_sum_exp = q.new_full((rows, h, l, 1), float("-inf")) if options.return_log_sum_exp else None
    return AttentionOutput(nothing, weights, log_sum_exp, q.new_zeros(1, 1, 1, 1, dtype=torch.bool))


def _contain(q: Tensor, k: Tensor, v: Tensor, rule: Rule, options: Options) -> AttentionOutput:
    """Attend over finite slots, with NaN for queries that may attend to another: a weight of 0 does not hide NaN."""
    broken = ~(torch.isfinite(k).all(-1).all(1) & torch.isfinite(v).all(-1).all(1))
    k, v = (tensor.masked_fill(broken[:, None, :, None], 0) for tensor in (k, v))
    result = _over_finite_slots(q, k, v, rule, options)
    result.fill(_queries_touching(rule, broken, q.shape[0]), math.nan, math.nan)
    return result


def _queries_touching(rule: Rule, slots: Tensor, rows: int) -> Tensor:
    """Return which queries, broadcastable to (rows, h, l, 1), may attend to one of some slots (b, m)."""
    if rule.allowed is None:  # causal: without any rule there is nothing to contain
        reached = (slots.cumsum(-1) > 0)[:, None, :, None]
    else:
        slots = repeat_rows(slots, max(slots.shape[0], rule.allowed.shape[0]))
        reached = (rule.allowed & slots[:, None, None]).any(-1, keepdim=True)
    return repeat_rows(reached, rows)


def _merge(rule: Rule, q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return one mask for queries folded by `_fold`, and the queries that may attend to nothing.

    The mask is bool, True = may attend, or floats of `dtype` to be added to the scores, or None. A query that may
    attend to nothing would divide 0 by 0: the mask lets it attend to everything, and its output is set to 0 later.
    """
    visible, allowed = rule.visible, None if rule.allowed is None else _fold_mask(rule.allowed, q, k)
    mask = allowed
    if rule.bias is not None:
        mask = rule.bias.to(dtype).reshape((1,) * (4 - rule.bias.dim()) + tuple(rule.bias.shape))
        mask = _fold_mask(mask.expand(*mask.shape[:3], k.shape[2]), q, k)
        hidden = allowed is not None or not (may_read(mask) and all_finite(mask))
        mask = mask if allowed is None else torch.where(allowed, mask, float("-inf"))
        allowed, visible = (mask != float("-inf"), None) if hidden else (None, visible)
    blind = _queries_without_slots(allowed, visible)
    if mask is None or blind is None:
        return mask, None
    return mask | blind if mask.dtype is torch.bool else mask.masked_fill(blind, 0), blind


def _queries_without_slots(allowed: Tensor | None, visible: Tensor | bool | None) -> Tensor | None:
    """Return the queries that may attend to nothing, or None where there are none."""
    if allowed is None or visible is True:
        return None
    if isinstance(visible, Tensor):
        return ~visible
    blind = ~allowed.any(-1, keepdim=True)
    return None if may_read(blind) and not bool(blind.any()) else blind


def _fold(tensor: Tensor, b: int, g: int) -> Tensor:
    """Fold (r·b, g·n, l, x) to (b, g, r·n·l, x), where r rows and n heads of queries share keys and values."""
    r, n = tensor.shape[0] // b, tensor.shape[1] // g
    if r == 1 and n == 1:
        return tensor
    l, x = tensor.shape[2:]
    return tensor.reshape(b, r, g, n, l, x).transpose(1, 2).reshape(b, g, r * n * l, x)


def _unfold(tensor: Tensor, rows: int, h: int) -> Tensor:
    """Undo `_fold`: (rows, h, l, x)."""
    b, g = tensor.shape[:2]
    r, n = rows // b, h // g
    if r == 1 and n == 1:
        return tensor
    l = tensor.shape[2] // (r * n)
    return tensor.reshape(b, g, r, n, l, -1).transpose(1, 2).reshape(rows, h, l, -1)


def _fold_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Fold a mask as its queries are folded; one for whole rows stays as it is."""
    (rows, h, l, _), (b, g, m, _) = q.shape, k.shape
    whole_rows = mask.shape[1] == mask.shape[2] == 1 and mask.shape[0] in (1, b)
    if whole_rows or (rows == b and h == g):
        return mask
    return _fold(repeat_rows(mask, rows).expand(rows, h, l, m), b, g)


def _unfold_result(result: AttentionOutput, rows: int, h: int) -> AttentionOutput:
    visible = result.visible
    if visible is not None:
        visible = repeat_rows(visible, rows) if visible.shape[1:3] == (1, 1) else _unfold(visible, rows, h)
    return AttentionOutput(
        _unfold(result.output, rows, h),
        None if result.weights is None else _unfold(result.weights, rows, h),
        None if result.log_sum_exp is None else _unfold(result.log_sum_exp, rows, h),
        visible,
    )


def concatenate(results: Sequence[AttentionOutput]) -> AttentionOutput:
    """Concatenate the results of rows that were attended to one by one."""

    def cat(parts: Iterable[Tensor | None]) -> Tensor | None:
        tensors = [part for part in parts if part is not None]
        return torch.cat(tensors) if tensors else None

    visible = None
    if any(one.visible is not None for one in results):
        visible = cat(one.visible_queries() for one in results)
    output = torch.cat([one.output for one in results])
    return AttentionOutput(
        output, cat(one.weights for one in results), cat(one.log_sum_exp for one in results), visible
    )


def merge(outputs: Sequence[Tensor], totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the attention over all parts together: (b, h, l, v), and its log-sum-exp (b, h, l, 1).

    With oᵢ = softmax(sᵢ) vᵢ and Lᵢ = log Σ exp sᵢ of part i, it is Σ exp(Lᵢ − log Σ exp Lⱼ) oᵢ (FlashAttention, arXiv
    2205.14135, section 3.1; Hydragen, arXiv 2402.05099, section 3.2).

    >>> output, total = merge([torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)], [torch.zeros(1, 1, 1, 1)] * 2)
    >>> output.flatten().tolist(), round(total.exp().item(), 3)
    ([0.5, 0.5], 2.0)
    """
    stacked = torch.stack(list(totals))
    # As far down as it goes, instead of infinitely: its gradients stay finite.
    total = stacked.clamp(min=torch.finfo(stacked.dtype).min).logsumexp(0)
    shares = (stacked - total).exp()
    merged = sum((share * one for share, one in zip(shares, outputs, strict=True)), torch.zeros_like(shares[0]))
    return merged.to(outputs[0].dtype), total.masked_fill((stacked == float("-inf")).all(0), float("-inf"))


class FusedAttention(torch.autograd.Function):
    """torch's fused attention on the CPU with its log-sum-exp; both have gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return output (b, h, l, k) and log-sum-exp (b, h, l, 1); `bias`, broadcastable to (b, h, l, m), is added."""
        output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        ctx.save_for_backward(q, k, v, bias, output, total)
        ctx.scale = scale
        return output, total[..., None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dS = P (dP − Σ dO O + dL), where torch's own kernel knows no dL.

        It computes Σ dO O by itself: a further column, where dO is 1, O is −dL and all else is 0, adds dL.
        """
        q, k, v, bias, output, total = ctx.saved_tensors
        grad, grad_of_total = grads
        zero = torch.zeros((), dtype=q.dtype, device=q.device)

        def with_column(tensor: Tensor, column: Tensor) -> Tensor:
            return torch.cat([tensor, column.expand(*tensor.shape[:-1], 1).to(tensor.dtype)], -1)

        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            with_column(grad, zero + 1),
            *(with_column(tensor, zero) for tensor in (q, k, v)),
            with_column(output, -grad_of_total),
            total,
            0.0,
            False,
            attn_mask=bias,
            scale=ctx.scale,
        )
        return *(one[..., :-1] for one in gradients), None, None
