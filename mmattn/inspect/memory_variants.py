"""Memories that differ from a given one in one respect: other contents, no slots, other padding.

What some kinds read has rows and no slots of vectors: prefixes, passages, what another model has read. There another
memory of a row is that of the row after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.adapters.composed.prompt import AugmentedPrompt
from mmattn.memory import Memory

# Masked slots that `padded` appends.
EXTRA = 3


def has_rows(memory: Any) -> bool:
    """Whether this is what a kind reads that has rows and no slots."""
    return not isinstance(memory, Memory) and hasattr(memory, "__getitem__") and hasattr(memory, "batch")


def shuffled(memory: Any, where: Tensor | None = None) -> Any:
    """Another memory of the same statistics: the channels of every vector in another order, or the rows.

    A vector that another order leaves as it is, such as one number, changes its sign, and one of zeros becomes ones.

    Args:
        memory: (b, m, e), or one of b rows.
        where: (b,) or (b, m) bool, which rows or slots change; None for all.
    """
    if not isinstance(memory, Memory):
        row = torch.arange(memory.batch)
        other = row.roll(-1) if where is None else torch.where(where.cpu(), row.roll(-1), row)
        moved = memory[other]
        # The text of the row begins otherwise than what was read.
        return replace(moved, ids=None) if isinstance(moved, AugmentedPrompt) else moved
    order = torch.randperm(memory.dim, generator=torch.Generator().manual_seed(0)).to(memory.device)
    tokens = memory.tokens[..., order]
    alike = (tokens == memory.tokens).all(-1, keepdim=True)
    tokens = torch.where(alike, torch.where(tokens == 0, 1, -tokens), tokens)
    if where is not None:
        where = where.to(memory.device)
        tokens = torch.where(where[..., None] if where.dim() == 2 else where[:, None, None], tokens, memory.tokens)
    return memory.replace(tokens)


def emptied(memory: Memory, where: Tensor | None = None) -> Memory:
    """The memory with every slot of some rows masked.

    Args:
        memory: (b, m, e).
        where: (b,) bool, which rows; None for all.
    """
    real = memory.real_slots()
    mask = torch.zeros_like(real) if where is None else real & ~where.to(real.device)[:, None]
    return Memory(memory.tokens, mask, memory.segments, memory.scores, check_finite=False)


def cut(memory: Memory) -> Memory:
    """The memory with 0 slots."""
    segments, scores = (None if one is None else one[:, :0] for one in (memory.segments, memory.scores))
    return Memory(memory.tokens[:, :0], None, segments, scores)


def padded(memory: Memory, filling: float) -> Memory:
    """The memory with a few more masked slots, and a number in all masked slots and their scores.

    Args:
        memory: (b, m, e).
        filling: the number; every other channel is its negative.
    """
    real = memory.real_slots()
    mask = F.pad(real, (0, EXTRA))
    # A vector of equal numbers would be the same for any number after a LayerNorm.
    garbage = filling * (1 - 2 * (torch.arange(memory.dim, device=memory.device) % 2)).to(memory.dtype)
    tokens = torch.where(mask[..., None], F.pad(memory.tokens, (0, 0, 0, EXTRA)), garbage)
    segments, scores = (None if one is None else F.pad(one, (0, EXTRA)) for one in (memory.segments, memory.scores))
    scores = None if scores is None else scores.masked_fill(~mask.to(scores.device), filling)
    return Memory(tokens, mask, segments, scores, check_finite=False)
