"""Draw every rule of `mmattn.masks` for docs/core.md, with the functions themselves.

python docs/draw_masks.py
"""

from __future__ import annotations

from pathlib import Path

import torch

from mmattn import masks
from mmattn.inspect import plot_mask

PICTURES = Path(__file__).resolve().parent / "pictures"

_IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, -1]])
_IMAGES = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 3]])
_SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]])
_HOLES = torch.tensor([[True, True, False, True, True, True, False, False, True]])

DRAWN = {
    "padding": masks.padding([7, 4], 9),
    "padding_mask": masks.padding_mask(_HOLES),
    "causal": masks.causal(8),
    "causal_offset": masks.causal(5, offset=4),
    "window": masks.window(10, 10, size=3),
    "chunk": masks.chunk(12, chunk_size=3, neighbour_length=4),
    "block": masks.block(_IDS, _IDS),
    "media_latest": masks.media(_IMAGES, _SEGMENTS),
    "media_previous": masks.media(_IMAGES, _SEGMENTS, visible_segments="previous"),
    "media_all": masks.media(_IMAGES, _SEGMENTS, visible_segments="all"),
    "block_and_causal": masks.block(_IDS, _IDS) & masks.causal(10),
}


def draw(folder: Path) -> list[Path]:
    """A picture for each rule; one that holds for every query is drawn for six."""
    six = torch.ones(6, 1, dtype=torch.bool)
    drawn = {name: mask & six if mask.shape[-2] == 1 else mask for name, mask in DRAWN.items()}
    return [plot_mask(mask, folder / f"{name}.png") for name, mask in drawn.items()]


if __name__ == "__main__":
    draw(PICTURES)
