"""Which layout of keys and values is the cheapest for a memory, counted in multiplications.

Three layouts give the same numbers to rounding. *Padded* projects every slot. *Packed* projects and attends to real
slots only. *Absorbed* projects no slot at all: q (M Wk)ᵀ = (q Wkᵀ) Mᵀ and w (M Wv) = (w M) Wv, cheaper while there are
few queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmattn.core.tracing import may_read

# Packing costs a kernel launch per row: it pays once it saves about this many multiplications per row.
PACK_SAVES = 2_000_000
# The absorbed form pays up to this share of the multiplications of projecting; processors with fast half-precision
# matrix products project so quickly that only a few queries are worth it, and only over that many slots.
ABSORB_MARGIN = 0.5
ABSORB_MARGIN_HALF = 0.2
ABSORB_LEAST_HALF = 512

# torch 2.6 cannot tell exporting from compiling.
_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def packed_lengths(mask: Tensor | None, cost: int) -> tuple[int, ...] | None:
    """Number of real slots of each row where leaving out the padding pays, else None.

    Args:
        mask: (b, m) bool, True = real; None where every slot is.
        cost: multiplications per slot.
    """
    if mask is None or not may_read(mask):
        return None
    lengths = tuple(mask.sum(1).tolist())
    saved = (mask.numel() - sum(lengths)) * cost
    return lengths if saved > PACK_SAVES * len(lengths) else None


def absorbing_pays(
    queries: int, slots: float, rows: int, half: bool, *, num_heads: int, num_kv_heads: int, head_dim: int, dim: int
) -> bool:
    """Whether wider queries, scores and results cost less than keys and values of every slot.

    Args:
        queries: per row of the memory.
        slots: m, or the mean number of real slots per row.
        rows: b.
        half: whether the memory is in half precision.
        num_heads: h.
        num_kv_heads: g.
        head_dim: k.
        dim: e.
    """
    if _exporting():
        return False  # the program would hold only for lengths of the same answer
    margin = ABSORB_MARGIN
    if half:
        margin = ABSORB_MARGIN_HALF if rows * slots >= ABSORB_LEAST_HALF else 0
    absorbed = queries * num_heads * ((dim - head_dim) * slots + head_dim * dim)
    return absorbed < margin * slots * dim * num_kv_heads * head_dim
