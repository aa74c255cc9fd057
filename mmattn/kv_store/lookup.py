"""Requests to a bank: which entries they ask for, checked, and the memory that these entries make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ShapeError, check_bool_mask
from mmattn.memory import Memory


def is_int(tensor: Tensor) -> bool:
    """Whether a tensor is of an integer dtype."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_rows(rows: Tensor | Sequence[int], count: int) -> Tensor:
    """The numbers of some entries as a tensor (n,).

    Args:
        rows: as given.
        count: rows of the bank.

    Raises:
        IndexError: a row that was never there.
        ShapeError: rows that are no list of ints, or name one twice.
    """
    given = torch.as_tensor(rows)
    given = given.long() if not given.numel() else given
    if given.dim() != 1 or not is_int(given):
        raise ShapeError(f"rows must be ints (n,), got {given.dtype} {tuple(given.shape)}")
    wrong = given[(given < 0) | (given >= count)]
    if len(wrong):
        raise IndexError(f"row {int(wrong[0])} was asked for, and this bank has rows 0 to {count - 1}")
    if len(given.unique()) != len(given):
        raise ShapeError("rows names one row twice: give each row once")
    return given.long()


def check_hits(
    rows: Tensor, mask: Tensor | None, scores: Tensor | None, sources: Sequence[Sequence[Any]] | None
) -> Tensor:
    """Which hits of a request are there, (b, n) bool.

    Args:
        rows: (b, n) int.
        mask: (b, n) bool, False = a missing hit; None where all are there.
        scores: (b, n) float.
        sources: b rows of n entries.

    Raises:
        ShapeError: rows that are no int tensor (b, n), or arguments that do not fit them.
        MaskError: a mask that is not bool.
    """
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not is_int(rows):
        given = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ShapeError(f"rows must be an int tensor (b, n), the entries of each request; got {given}")
    b, n = rows.shape
    hits = torch.ones_like(rows, dtype=torch.bool) if mask is None else check_bool_mask("mask", mask)
    for what, shape in (("mask", hits.shape), ("scores", rows.shape if scores is None else scores.shape)):
        if shape != rows.shape:
            raise ShapeError(f"{what} must be (b, n) = {(b, n)} as the rows are, got {tuple(shape)}")
    if sources is not None and [len(row) for row in sources] != [n] * b:
        raise ShapeError(f"sources need one entry per hit, {b} rows of {n}; got {[len(row) for row in sources]}")
    return hits


def memory_of_hits(
    tokens: Tensor, mask: Tensor, hits: Tensor, scores: Tensor | None, sources: Sequence[Sequence[Any]] | None
) -> Memory:
    """The slots of the hits of each row, one hit after another, as a memory (b, n·m, e); each hit is a segment.

    Args:
        tokens: (b, n, m, e).
        mask: (b, n, m) bool, the padding.
        hits: (b, n) bool, as `check_hits` gives it.
        scores: (b, n) float.
        sources: b rows of n entries.

    Raises:
        NonFiniteError: NaN or infinity in the score of a hit.
    """
    b, n, m, _ = tokens.shape
    if scores is not None:
        # A missing hit's score may be anything.
        scores = torch.where(hits, scores.to(tokens.device), 0).repeat_interleave(m, 1)
    segments = torch.arange(n, device=tokens.device).repeat_interleave(m).expand(b, -1)
    repeated = None if sources is None else [[source for source in row for _ in range(m)] for row in sources]
    memory = Memory(tokens.flatten(1, 2), mask.flatten(1), segments, scores, repeated, check_finite=False)
    if scores is not None:
        Memory(tokens.new_empty(b, n * m, 0), scores=scores).check_finite()
    return memory
