"""`arrived=`: how many slots of a memory had arrived at each token of a text, checked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import Arrivals
from mmattn.errors import MaskError, ShapeError, check_int


def arrivals_of(arrived: Tensor, window: int | None, sources: Iterable[BoundMemory]) -> Arrivals:
    """Return the slots that had arrived at each token (b, l), for the memories of one call."""
    if arrived.is_floating_point() or arrived.dtype is torch.bool:
        raise MaskError(f"arrived counts slots and must hold integers, got {arrived.dtype}")
    for source in sources:
        source.hide_arrivals()
        if arrived.dim() != 2 or len(arrived) != source.rows:
            raise ShapeError(
                f"arrived must be (b, l) with b = {source.rows} as the memory has, got {tuple(arrived.shape)}"
            )
    return Arrivals(arrived, None if window is None else check_int("window", window))
