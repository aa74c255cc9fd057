"""Which slots of a memory had arrived at each token of a text: checked, and made known to what reads the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.prepared_memory import ProjectedMemory
from mmattn.adapters.text_state import Arrivals
from mmattn.errors import ConditionError, MaskError, ShapeError, check_int


def arrivals_of(arrived: Tensor, window: int | None, sources: Mapping[str, Any]) -> Arrivals:
    """The boundary of each token, for the sources of one call.

    Args:
        arrived: (b, l) int, slots that had arrived at each token.
        window: how many of the latest each token sees; None for all.
        sources: of the call, by adapter.

    Raises:
        MaskError: no integers.
        ShapeError: another number of rows than the memory has.
        ConditionError: adapters that do not read the slots one by one, or a memory that is no whole one.
    """
    if arrived.is_floating_point() or arrived.dtype is torch.bool:
        raise MaskError(f"arrived counts slots and must hold integers, got {arrived.dtype}")
    for name, source in sources.items():
        if not isinstance(source, ProjectedMemory) or getattr(source.adapter, "resampler", None) is not None:
            raise ConditionError(
                f"arrived= hides slots of a Memory from tokens, and adapter {name!r} reads none of its slots as they "
                "are (a stream, parts, neighbours, a resampler): leave it out"
            )
        if arrived.dim() != 2 or len(arrived) != source.rows:
            raise ShapeError(
                f"arrived must be (b, l) with b = {source.rows} as the memory has, got {tuple(arrived.shape)}"
            )
        source.follows_text = True
    return Arrivals(arrived, None if window is None else check_int("window", window))
