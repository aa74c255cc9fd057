"""What arrives in pieces."""

from __future__ import annotations

from itertools import cycle

from torch import Tensor


def cut(whole: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Pieces (n, …) of a whole, whose sizes follow each other again and again."""
    pieces, start = [], 0
    for size in cycle(sizes):
        if start >= len(whole):
            return pieces
        pieces.append(whole[start : start + size])
        start += size
    raise ValueError("no sizes")
