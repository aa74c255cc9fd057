"""Small pictures and a small CLIP for the encoders' tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def picture() -> Image.Image:
    """A coloured picture without any symmetry."""
    y, x = np.mgrid[0:47, 0:61].astype(np.float64)
    channels = [255 * x / 61, 255 * y / 47, 127 + 120 * np.sin(x / 9 + y / 13)]
    return Image.fromarray(np.stack(channels, -1).round().astype(np.uint8))


@pytest.fixture
def tiny_clip() -> dict[str, Any]:
    """An open_clip config: 40 x 40 pixels in 5 x 5 patches, width 24, embeddings of 19."""
    return {
        "embed_dim": 19,
        "vision_cfg": {"image_size": 40, "layers": 2, "width": 24, "head_width": 12, "patch_size": 8},
        "text_cfg": {"context_length": 13, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
