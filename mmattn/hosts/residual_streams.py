"""Hosts whose layers hand on several residual streams for each token (hyper-connections, arXiv 2409.19606; AltUp,
arXiv 2301.13310): adapters read the mean of the streams, and what they add is added to every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mmattn.errors import AttachError


def stream_axis(x: Any, rows: int, length: int | None, width: int) -> int | None:
    """Which axis of hidden states counts residual streams; None where there is but one, and x is (b, l, d).

    Args:
        x: what a layer hands on: (b, l, d), (b, l, streams, d) or (streams, b, l, d).
        rows: b, not the same as `length`.
        length: l of the text; None where it is not known, and there is but one stream.
        width: d.

    Raises:
        AttachError: it is something else.
    """
    shape = tuple(x.shape) if isinstance(x, Tensor) else ()
    if len(shape) == 3 and shape[::2] == (rows, width):
        return None  # with more tokens than the text has, where the host puts a prompt before it
    if len(shape) == 4 and shape[3] == width:
        if shape[:2] == (rows, length):
            return 2
        if shape[1:3] == (rows, length):
            return 0
    given = shape if isinstance(x, Tensor) else type(x).__name__
    raise AttachError(
        f"adapters act on hidden states (b, l, {width}), or on several residual streams of them, and the layers of "
        f"this host hand on {given} for {rows} rows of {length or 'some'} tokens (two kinds of states, another width "
        "or order): no adapter can be put on it"
    )


def change_streams(x: Tensor, axis: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Hidden states with what a change of their mean over the streams adds.

    Args:
        x: hidden states.
        axis: of the streams.
        change: of hidden states (b, l, d).
    """
    mean = x.mean(axis)
    return x + (change(mean) - mean).unsqueeze(axis)
