"""How the tokens of a picture lie in it, for transformers that are given them packed in one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmattn.hosts.diffusion.scale import Grid


def packed_grid(given: Mapping[str, Any], length: int) -> Grid | None:
    """Frames, height and width, in tokens, from what a host is told of its picture; None where it is not told.

    Args:
        given: the arguments of the host by name: `img_ids` (Flux), `img_shapes` (Qwen-Image), or `num_frames`, `height`
            and `width` (LTX).
        length: l, tokens of the picture.
    """
    for grid in (_of_ids(given.get("img_ids")), _of_shapes(given.get("img_shapes")), _of_sizes(given)):
        if grid is not None and grid[0] * grid[1] * grid[2] == length:
            return grid
    return None


def _of_ids(ids: Any) -> Grid | None:
    if not isinstance(ids, Tensor):
        return None
    positions = ids.reshape(-1, ids.shape[-1])[:, :3]
    first, height, width = (int(size) for size in (positions.amax(0) - positions.amin(0) + 1).tolist())
    return first, height, width


def _of_shapes(shapes: Any) -> Grid | None:
    while isinstance(shapes, (list, tuple)) and shapes and isinstance(shapes[0], (list, tuple)):
        if len(shapes[0]) == 3 and all(isinstance(size, int) for size in shapes[0]):
            break
        shapes = shapes[0]
    if not shapes or len(shapes) != 1:
        return None  # several pictures of one row
    frames, height, width = shapes[0]
    return frames, height, width


def _of_sizes(given: Mapping[str, Any]) -> Grid | None:
    frames, height, width = (given.get(name) for name in ("num_frames", "height", "width"))
    if not all(isinstance(size, int) for size in (frames, height, width)):
        return None
    return int(frames), int(height), int(width)  # type: ignore[arg-type]
