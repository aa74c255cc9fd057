"""A picture, and what arrives in pieces."""

from __future__ import annotations

from itertools import cycle

import numpy as np
from PIL import Image
from torch import Tensor


def drawing(width: int = 61, height: int = 47) -> Image.Image:
    """A smooth coloured picture without any symmetry."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    red, green, blue = 255 * x / width, 255 * y / height, 127 + 120 * np.sin(x / 9 + y / 13)
    return Image.fromarray(np.stack([red, green, blue], -1).round().astype(np.uint8))


def cut(whole: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Pieces (n, …) of a whole, whose sizes follow each other again and again."""
    pieces, start = [], 0
    for size in cycle(sizes):
        if start >= len(whole):
            return pieces
        pieces.append(whole[start : start + size])
        start += size
    raise ValueError("no sizes")
