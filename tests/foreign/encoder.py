"""An encoder of another package in one file: the mean colour of image stripes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmattn.extend import ImageEncoder, ImageProcessor, register_encoder


@register_encoder("stripes")
class StripesEncoder(ImageEncoder):
    """Mean colours of `count` horizontal stripes, as a memory (b, count, 3)."""

    def __init__(self, count: int, *, pooled: bool = False, device: str | torch.device | None = None) -> None:
        self.count = count
        processor = ImageProcessor(size=16, mean=0.0, std=1.0)
        settings = {"encoder": "stripes", "count": count}
        super().__init__(nn.BatchNorm2d(3), processor, pooled=pooled, settings=settings, device=device)

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooled: bool = False) -> StripesEncoder:
        """Build the encoder of "stripes:COUNT"."""
        return cls(int(name), pooled=pooled, device=device)

    def features(self, pixels: Tensor) -> Tensor:
        """Return (b, count, 3)."""
        return nn.functional.adaptive_avg_pool2d(pixels, (self.count, 1))[..., 0].transpose(1, 2)
