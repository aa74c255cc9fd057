"""Scaled dot-product attention over a masked memory: the only attention softmax of the package.

softmax(q kᵀ / √k + bias) v (arXiv 1706.03762, equation 1; the scale is inside the softmax), with three departures: a
query that may look at nothing gets exactly 0 and finite gradients; what lies in slots that a query may not look at has
no influence on it, forward or backward; heads and beams that share keys and values are folded into the query length
instead of copying keys and values.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.core.log_sum_exp import FusedAttention
from mmattn.core.masks import Mask, causal as causal_mask
from mmattn.core.tracing import autocast, may_read, transform_under_way
from mmattn.errors import MaskError, ShapeError, check_bool_mask, check_choice, check_float

BACKENDS = ("sdpa", "eager")
# Slots up to which half precision with gradients goes through float32 on the CPU: its backward is twice as fast there.
_WIDEN_UP_TO = 320


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
    """Scaled dot-product attention of queries over masked keys and values: (b, h, l, v).

    Args:
        q: (b, h, l, k). Its rows may be a multiple of those of k and v: row i of q then reads row i // multiple
            (beams), and nothing is copied.
        k: (b, g, m, k), where g divides h.
        v: (b, g, m, v).
        mask: (b, m) bool, True = may look; the padding of k and v.
        attention_mask: (l, m), (b, l, m) or (b, h, l, m) bool or a `Mask`, True = may look.
        bias: float, broadcastable to (b, h, l, m), added to the scaled scores; a query with -inf on every slot it may
            look at gives 0.
        causal: query i may look at keys up to i + m - l.
        scale: of the scores; 1/√k by default.
        dropout: probability of dropping a weight, from 0 to below 1.
        backend: "sdpa" (fused) or "eager" (scores in float32 at least, gives weights); chosen by default.
        return_weights: also return the weights (b, h, l, m) before dropout.

    NaN and infinity in a slot reach the queries that may look at it, as NaN, and no others. Where only some may, no
    gradient flows back from those it reaches.

    Raises:
        ConfigError: a backend that does not exist, a dropout that is no probability.
        MaskError: a mask that is not bool, a bias that is.
        ShapeError: sizes, dtypes or devices that do not fit.

    >>> q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    >>> attend(q, k, k, mask=torch.tensor([[True] * 5, [False] * 5]))[1].abs().sum()
    tensor(0.)
    """
    _check_attend(q, k, v, bias)
    b, m = k.shape[0], k.shape[2]
    if backend is not None:
        check_choice("backend", backend, BACKENDS)
    if dropout:
        check_float("dropout", dropout, at_least=0, below=1)
    allowed = combine_masks(mask, attention_mask, (q.shape[0], b, q.shape[1], q.shape[2], m))
    # The kernel's own causal rule counts queries, so it holds only where none are folded and there is no other rule.
    if causal and not (allowed is None and bias is None and q.shape[:3] == (b, k.shape[1], m) and not return_weights):
        rule = causal_mask(q.shape[2], m, offset=m - q.shape[2]).tensor.to(q.device)
        allowed = rule[None, None] if allowed is None else allowed & rule
        causal = False
    contain = causal
    if allowed is not None:
        # Zeros where no query may look: 0 · NaN would reach the sums, forward or backward.
        hidden = ~visible_slots(allowed, b, m)[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        contain = allowed.shape[1:3] != (1, 1) or allowed.shape[0] not in (1, b)
    return attend_checked(  # type: ignore[return-value]  # one extra at most
        q,
        k,
        v,
        allowed,
        bias,
        causal=causal,
        contain=contain,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
        dropout=dropout,
        backend=backend,
        return_weights=return_weights,
    )


def combine_masks(
    mask: Tensor | None, attention_mask: Tensor | Mask | None, sizes: tuple[int, int, int, int, int]
) -> Tensor | None:
    """One bool tensor broadcastable to (b, h, l, m) from a padding mask and an attention mask, or None.

    Args:
        mask: (memory rows, m).
        attention_mask: (l, m), (rows, l, m) or (rows, h, l, m).
        sizes: text rows, memory rows, h, l, m.

    Raises:
        MaskError: not bool.
        ShapeError: another shape; a (b, m) mask is never taken for (l, m) or the other way round.
    """
    rows, memory_rows, h, l, m = sizes
    allowed = None
    if mask is not None:
        if check_bool_mask("mask", mask).shape != (memory_rows, m):
            raise ShapeError(
                f"mask must be (b, m) = {(memory_rows, m)}, got {tuple(mask.shape)}; a mask over queries (l, m) is "
                "called attention_mask"
            )
        allowed = mask[:, None, None, :]
    if attention_mask is not None:
        given = attention_mask.tensor if isinstance(attention_mask, Mask) else attention_mask
        given = check_bool_mask("attention_mask", given)
        shaped = given if given.dim() == 4 else given[:, None] if given.dim() == 3 else given[None, None]
        fits = given.dim() in (2, 3, 4) and all(
            size in (1, *full) for size, full in zip(shaped.shape, ((rows, memory_rows), (h,), (l,), (m,)), strict=True)
        )
        exact = isinstance(attention_mask, Mask) or given.shape[-2:] == (l, m)
        if not (fits and exact):
            raise ShapeError(
                f"attention_mask must be (l, m) = {(l, m)}, (b, l, m) or (b, h, l, m) with b = {rows}, h = {h}; got "
                f"{tuple(given.shape)}; a padding mask (b, m) is called mask"
            )
        if allowed is None:
            return shaped
        if shaped.shape[0] == rows != memory_rows:
            allowed = allowed.repeat_interleave(rows // memory_rows, 0)
        allowed = allowed & shaped
    return allowed


def _check_attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ShapeError(
            f"attend needs q (b, h, l, k), k (b, g, m, k), v (b, g, m, v); got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"k and v must agree in (b, g, m) and q and k in k; got q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"key/value heads must divide heads, got {k.shape[1]} and {q.shape[1]}; each needs one at least"
        )
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ShapeError(
            f"heads must be at least 1 wide, got queries and keys of width {q.shape[3]} and values of {v.shape[3]}"
        )
    if q.shape[0] != k.shape[0] and (k.shape[0] == 0 or q.shape[0] % k.shape[0]):
        raise ShapeError(
            f"rows of q must be those of k or a multiple of them (beams), got {q.shape[0]} and {k.shape[0]}"
        )
    if not q.device == k.device == v.device:
        raise ShapeError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if not q.dtype == k.dtype == v.dtype and not autocast(q):
        raise ShapeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: convert with .to()")
    if bias is None:
        return
    if not bias.is_floating_point():
        raise MaskError(f"bias is added to the scores and must be float, got {bias.dtype}; a mask is attention_mask")
    wanted = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(shape) != 4 or any(size not in (1, full) for size, full in zip(shape, wanted, strict=True)):
        raise ShapeError(f"bias must be broadcastable to (b, h, l, m) = {wanted}, got {tuple(bias.shape)}")


def visible_slots(allowed: Tensor, memory_rows: int, m: int) -> Tensor:
    """Which slots (b, m) any query or head of the row may look at."""
    visible = allowed.any(1).any(1)
    if visible.shape[0] not in (1, memory_rows):
        visible = visible.unflatten(0, (memory_rows, -1)).any(1)
    return visible.expand(memory_rows, m)


def visible_rows(
    allowed: Tensor | None,
    rows: int,
    m: int,
    *,
    per_head: bool = False,
    device: torch.device | None = None,
) -> Tensor | None:
    """Which queries (b, l or 1, 1) may look at anything, or None where all of them may.

    Args:
        allowed: all rules together, broadcastable to (b, h, l, m); None where everything may be seen.
        rows: b, a multiple of the rows of `allowed`.
        m: number of slots.
        per_head: the answer is (b, h or 1, l or 1, 1) instead.
        device: of the answer where there is no `allowed` to tell.
    """
    if m == 0:
        allowed = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device if allowed is None else allowed.device)
    if allowed is None:
        return None
    seen = allowed.any(-1, keepdim=True)
    seen = seen if per_head else seen.any(1)
    if may_read(seen) and bool(seen.all()):
        return None
    return seen if seen.shape[0] in (1, rows) else seen.repeat_interleave(rows // seen.shape[0], 0)


def _fold(tensor: Tensor, b: int, g: int) -> Tensor:
    """(r·b, g·n, l, x) to (b, g, r·n·l, x), where r queries rows and n heads share keys and values."""
    r, n = tensor.shape[0] // b, tensor.shape[1] // g
    if r == 1 and n == 1:
        return tensor
    l, x = tensor.shape[2:]
    return tensor.reshape(b, r, g, n, l, x).transpose(1, 2).reshape(b, g, r * n * l, x)


def _unfold(tensor: Tensor, rows: int, h: int) -> Tensor:
    """The inverse of `_fold`."""
    b, g = tensor.shape[:2]
    r, n = rows // b if b else 1, h // g
    if r == 1 and n == 1:
        return tensor
    l = tensor.shape[2] // (r * n)
    return tensor.reshape(b, g, r, n, l, -1).transpose(1, 2).reshape(rows, h, l, -1)


def _fold_mask(allowed: Tensor, rows: int, h: int, l: int, b: int, g: int) -> Tensor:
    if (rows == b and h == g) or (allowed.shape[1] == 1 and allowed.shape[2] == 1 and allowed.shape[0] in (1, b)):
        return allowed
    if allowed.shape[0] not in (1, rows):
        allowed = allowed.repeat_interleave(rows // allowed.shape[0], 0)
    return _fold(allowed.expand(rows, h, l, allowed.shape[3]), b, g)


def all_finite(first: Tensor, *more: Tensor) -> bool:
    """Whether no value of some tensors is NaN or infinite; values whose sum overflows count as infinite, too."""
    # A sum is finite only if every term is, and reads the tensor once without an intermediate.
    wide = torch.float64 if first.dtype is torch.float64 else torch.float32
    total = first.detach().sum(dtype=wide)
    for one in more:
        if one is not first:
            total += one.detach().sum(dtype=wide)
    return math.isfinite(total)


def attend_checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    contain: bool = False,
    dropout: float = 0.0,
    backend: str | None = None,
    return_weights: bool = False,
    return_total: bool = False,
    seen: Tensor | bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`attend` without its checks.

    Args:
        q: (b, h, l, k).
        k: (b, g, m, k); slots that no query of a row may look at hold finite values, unless `contain`.
        v: (b, g, m, v); likewise.
        allowed: all rules together, broadcastable to (b, h, l, m); None where everything may be seen.
        bias: as in `attend`.
        scale: of the scores.
        causal: query i may look at keys up to i, where l is m, no rows or heads are folded and there is no other rule.
        contain: slots that some query may not look at may hold NaN or infinity.
        dropout: probability of dropping a weight.
        backend: as in `attend`.
        return_weights: also return the weights (b, h, l, m) before dropout.
        return_total: also return, last, the log-sum-exp of the scores (b, h, l, 1), -inf where nothing may be seen.
        seen: (b, 1, 1, 1) bool, which rows may look at anything, or True where all may, where that is known and the
            same for all queries of a row.
    """
    rows, h, l, _ = q.shape
    b, g, m, _ = k.shape
    if not (m and rows and l):
        # Sums of nothing: exactly 0 whatever the tensors hold, and the graph stays whole.
        nothing = q.new_zeros(rows, h, l, v.shape[3]) + sum(tensor.reshape(-1)[:0].sum() for tensor in (q, k, v))
        total = q.new_full((rows, h, l, 1), float("-inf")) if return_total else None
        return _with_extras(nothing, q.new_zeros(rows, h, l, m) if return_weights else None, total)
    rest = scale, dropout, backend, return_weights, return_total, seen
    if contain and not (may_read(k) and all_finite(k, v)):
        return _attend_contained(q, k, v, allowed, bias, causal, *rest)
    return _attend_finite(q, k, v, allowed, bias, causal, *rest)


def _with_extras(out: Tensor, weights: Tensor | None, total: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    extras = [extra for extra in (weights, total) if extra is not None]
    return (out, *extras) if extras else out


def _attend_contained(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, causal: bool, *rest: Any
) -> Tensor | tuple[Tensor, ...]:
    """Attention over finite slots, and NaN for queries that may look at another: a weight of 0 does not hide NaN."""
    rows, b = q.shape[0], k.shape[0]
    broken = ~(torch.isfinite(k).all(-1).all(1) & torch.isfinite(v).all(-1).all(1))
    k, v = (tensor.masked_fill(broken[:, None, :, None], 0) for tensor in (k, v))
    if allowed is None:  # causal: without any rule there is nothing to contain
        reached = (broken.cumsum(-1) > 0)[:, None, :, None]
    else:
        of_row = broken if allowed.shape[0] in (1, b) else broken.repeat_interleave(rows // b, 0)
        reached = (allowed & of_row[:, None, None]).any(-1, keepdim=True)
    if reached.shape[0] != rows:
        reached = reached.repeat_interleave(rows // reached.shape[0], 0)
    out = _attend_finite(q, k, v, allowed, bias, causal, *rest)
    if isinstance(out, tuple):
        return tuple(one.masked_fill(reached, math.nan) for one in out)
    return out.masked_fill(reached, math.nan)


def _attend_finite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    backend: str | None,
    return_weights: bool,
    return_total: bool,
    seen: Tensor | bool | None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention where what a weight of 0 is multiplied with is finite."""
    rows, h, _, _ = q.shape
    b, g, m, _ = k.shape
    if backend is None and not torch.compiler.is_compiling() and transform_under_way() is not None:
        # torch's kernels have no rule for batches of batches, and no forward derivative.
        backend = "eager"
    if q.element_size() == 2 and q.device.type == "cpu" and not (backend or return_weights or return_total):
        needed = q.requires_grad or k.requires_grad or v.requires_grad
        # The length is asked last: a traced graph would hold only for lengths of the same answer.
        if needed and torch.is_grad_enabled() and m <= _WIDEN_UP_TO:
            with torch.autocast("cpu", enabled=False):
                out = _attend_finite(
                    q.float(), k.float(), v.float(), allowed, bias, causal, scale, dropout, None, False, False, seen
                )
            assert isinstance(out, Tensor)
            return out.to(v.dtype)
    plain = allowed is None and bias is None and h == g and rows == b
    if plain and not (return_weights or return_total) and backend != "eager":
        return F.scaled_dot_product_attention(q, k, v, None, dropout, causal, scale=scale)
    eager = return_weights or backend == "eager" or (return_total and not _gives_total(q, k, v, bias, causal, dropout))
    # Scores in float32 at least: float16 overflows, and bfloat16 scores lose accuracy the fused path keeps.
    dtype = torch.promote_types(q.dtype, torch.float32) if eager else q.dtype
    if allowed is not None:
        allowed = _fold_mask(allowed, rows, h, q.shape[2], b, g)
    if bias is not None:
        bias = bias.to(dtype).reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        bias = _fold_mask(bias.expand(*bias.shape[:3], m), rows, h, q.shape[2], b, g)
        if allowed is not None:
            bias = torch.where(allowed, bias, float("-inf"))
        if allowed is not None or not (may_read(bias) and all_finite(bias)):
            # A slot with a bias of -inf is hidden, too.
            allowed, seen = bias != float("-inf"), None
    q = _fold(q, b, g)

    # A row without any True would divide 0 by 0: it attends to everything, and its output is set to 0.
    empty = None
    if allowed is not None and seen is not True:
        known = isinstance(seen, Tensor)
        empty = ~seen if isinstance(seen, Tensor) else ~allowed.any(-1, keepdim=True)
        if not known and may_read(empty) and not bool(empty.any()):
            empty = None
        elif bias is None:
            allowed = allowed | empty
        else:
            bias = bias.masked_fill(empty, 0)

    rule = allowed if bias is None else bias
    weights = total = None
    if eager:
        out, weights, total = _eager(q, k, v, rule, causal, scale, dropout, return_total)
    else:
        if rule is not None:
            rule = rule.expand(-1, -1, q.shape[2], m)
        if return_total:
            if rule is not None and rule.dtype is torch.bool:
                rule = torch.zeros_like(rule, dtype=q.dtype).masked_fill(~rule, float("-inf"))
            out, total = FusedAttention.apply(q, k, v, rule, scale)
        else:
            out = F.scaled_dot_product_attention(q, k, v, rule, dropout, causal, scale=scale)
    if empty is not None:
        out = out.masked_fill(empty, 0)
        weights = None if weights is None else weights.masked_fill(empty, 0)
        total = None if total is None else total.masked_fill(empty, float("-inf"))
    out = _unfold(out, rows, h)
    return _with_extras(
        out,
        _unfold(weights, rows, h) if return_weights and weights is not None else None,
        _unfold(total, rows, h) if total is not None else None,
    )


def _gives_total(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float) -> bool:
    """Whether the fused kernel that gives the log-sum-exp can be used; it has no gradient of a bias."""
    alike = q.dtype is k.dtype is v.dtype and q.shape[3] == v.shape[3]
    learned = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    return q.device.type == "cpu" and alike and not (causal or dropout or learned)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    return_total: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention step by step, its weights, and the log-sum-exp of its scores where asked for.

    `rule` is bool, True = may look, or float, added to the scores.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False) if autocast(q) else nullcontext():
        scores = (q.to(wide) * scale) @ k.to(wide).transpose(-1, -2)
        if causal:
            rule = causal_mask(q.shape[2], k.shape[2]).tensor.to(q.device)
        if rule is not None:
            scores = scores.masked_fill(~rule, float("-inf")) if rule.dtype is torch.bool else scores + rule
        weights = scores.softmax(-1)
        out = F.dropout(weights, dropout, dropout > 0) @ v.to(wide)
        total = scores.logsumexp(-1, keepdim=True) if return_total else None
    return out.to(v.dtype), weights.to(v.dtype), total
