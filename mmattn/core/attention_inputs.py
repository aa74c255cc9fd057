"""Checks of the tensors of attention, its masks combined into one, and the queries and slots that see anything."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mmattn.core.masks import Mask, causal
from mmattn.core.tracing import autocast, may_read, readable
from mmattn.errors import MaskError, ShapeError, check_bool_mask


def check_beams(name: str, rows: int, memory_rows: int) -> None:
    """Refuse rows of queries that are no multiple of those of the memory."""
    if rows != memory_rows and (memory_rows == 0 or rows % memory_rows):
        raise ShapeError(
            f"rows of {name} must be those of the memory or a multiple of them (beams), got {rows} and {memory_rows}"
        )


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose sizes, devices or dtypes do not fit."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ShapeError(f"attend needs q (b, h, l, k), k (b, g, m, k), v (b, g, m, v); got {_shapes(q, k, v)}")
    h, g, width = q.shape[1], k.shape[1], q.shape[3]
    if k.shape[:3] != v.shape[:3] or k.shape[3] != width:
        raise ShapeError(f"k and v must agree in (b, g, m) and q and k in k; got {_shapes(q, k, v)}")
    if 0 in (g, h) or h % g:
        raise ShapeError(f"key/value heads must divide heads, got {g} and {h}; each needs one at least")
    if 0 in (width, v.shape[3]):
        raise ShapeError(f"heads must be at least 1 wide, got {_shapes(q, k, v)}")
    check_beams("q", q.shape[0], k.shape[0])
    if not q.device == k.device == v.device:
        raise ShapeError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if not q.dtype == k.dtype == v.dtype and not autocast(q):
        raise ShapeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: convert with .to()")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def check_bias(bias: Tensor | None, sizes: tuple[int, ...]) -> None:
    """Refuse a bias that is not float or not broadcastable to sizes (b, h, l, m)."""
    if bias is None:
        return
    if not bias.is_floating_point():
        raise MaskError(f"bias is added to the scores and must be float, got {bias.dtype}; a mask is attention_mask")
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(shape) != 4 or any(size not in (1, full) for size, full in zip(shape, sizes, strict=True)):
        raise ShapeError(f"bias must be broadcastable to (b, h, l, m) = {sizes}, got {tuple(bias.shape)}")


def join_causal(attention_mask: Tensor | Mask | None, l: int, m: int, device: torch.device) -> Mask:
    """Combine an attention mask with the causal rule: query i may attend to slots up to i + m - l."""
    rule = causal(l, m, offset=m - l, device=device)
    return rule if attention_mask is None else rule & attention_mask


def combine_masks(
    mask: Tensor | None, attention_mask: Tensor | Mask | None, sizes: tuple[int, int, int, int, int]
) -> Tensor | None:
    """Combine a padding mask and an attention mask into one bool tensor broadcastable to (b, h, l, m), or None."""
    rows, memory_rows, _, _, m = sizes
    padding = None
    if mask is not None:
        if check_bool_mask("mask", mask).shape != (memory_rows, m):
            raise ShapeError(
                f"mask must be (b, m) = {(memory_rows, m)}, got {tuple(mask.shape)}; a mask over queries (l, m) is "
                "called attention_mask"
            )
        padding = mask[:, None, None, :]
    if attention_mask is None:
        return padding
    allowed = _attention_mask(attention_mask, sizes)
    if padding is None:
        return allowed
    if allowed.shape[0] == rows:
        padding = repeat_rows(padding, rows)
    return padding & allowed


def _attention_mask(attention_mask: Tensor | Mask, sizes: tuple[int, int, int, int, int]) -> Tensor:
    """Return an attention mask with four axes."""
    rows, memory_rows, h, l, m = sizes
    exact = isinstance(attention_mask, Mask)
    mask = check_bool_mask(
        "attention_mask", attention_mask.tensor if isinstance(attention_mask, Mask) else attention_mask
    )
    shaped = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    fits = shaped.dim() == 4 and all(
        size in (1, *full) for size, full in zip(shaped.shape, ((rows, memory_rows), (h,), (l,), (m,)), strict=True)
    )
    if not fits or not (exact or mask.shape[-2:] == (l, m)):
        raise ShapeError(
            f"attention_mask must be (l, m) = {(l, m)}, (b, l, m) or (b, h, l, m) with b = {rows}, h = {h}; got "
            f"{tuple(mask.shape)}; a padding mask (b, m) is called mask"
        )
    return shaped


def visible_slots(allowed: Tensor, memory_rows: int, m: int) -> Tensor:
    """Return the slots (b, m) that any query or head of the row may attend to."""
    visible = allowed.any(1).any(1)
    if visible.shape[0] not in (1, memory_rows):
        visible = visible.unflatten(0, (memory_rows, -1)).any(1)
    return visible.expand(memory_rows, m)


@cache
def _constants(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return 0 and the smallest number of a dtype, on the CPU: kernels of other devices take them as numbers.

    A graph would take them as inputs, and one with inputs on the CPU is not replayed as a CUDA graph.
    """
    return torch.zeros((), dtype=dtype, device="cpu"), torch.tensor(torch.finfo(dtype).min, dtype=dtype, device="cpu")


def zero_hidden(tensor: Tensor, visible: Tensor) -> Tensor:
    """Return a tensor with zeros where a mask, broadcastable to it, is False, whatever stood there."""
    return torch.where(visible, tensor, _constants(tensor.dtype)[0] if readable(tensor) else 0.0)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a mask is True, and the smallest number of a dtype elsewhere, to be added to scores.

    A query that may attend to nothing then attends to all slots alike, where -inf would divide 0 by 0.
    """
    if not readable(allowed):
        return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return torch.where(allowed, *_constants(dtype))


def hide_slots(allowed: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with zeros where no query may look: 0 · NaN would reach the sums, forward or backward."""
    if allowed is None:
        return k, v
    visible = visible_slots(allowed, k.shape[0], k.shape[2])[:, None, :, None]
    return zero_hidden(k, visible), zero_hidden(v, visible)


def differs_by_query(allowed: Tensor | None, memory_rows: int) -> bool:
    """Return whether a rule differs between the queries of a row of the memory."""
    return allowed is not None and (allowed.shape[1:3] != (1, 1) or allowed.shape[0] not in (1, memory_rows))


def visible_rows(
    allowed: Tensor | None, rows: int, m: int, *, per_head: bool = False, device: torch.device | None = None
) -> Tensor | None:
    """Return the queries (b, l or 1, 1), or with heads (b, h or 1, l or 1, 1), that see a slot; None where all do."""
    if m == 0:
        allowed = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device if allowed is None else allowed.device)
    if allowed is None:
        return None
    visible = allowed.any(-1, keepdim=True)
    if not per_head:
        visible = visible[:, 0] if visible.shape[1] == 1 else visible.any(1)
    if may_read(visible) and bool(visible.all()):
        return None
    return repeat_rows(visible, rows)


def repeat_rows(tensor: Tensor, rows: int) -> Tensor:
    """Repeat each row (b, …) for its beams, to (rows, …); one row stays as it is."""
    return tensor if tensor.shape[0] in (1, rows) else tensor.repeat_interleave(rows // tensor.shape[0], 0)
