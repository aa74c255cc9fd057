"""A small encoder of style: of handwriting the stroke, slant and width."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.encoders.base import register_encoder
from mmattn.encoders.images import ImageEncoder, each_image
from mmattn.errors import ConfigError, ImageError, check_int
from mmattn.models.loading import read_weights
from mmattn.storage.files import replacing
from mmattn.storage.json_files import parse_errors

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH = 64
LARGEST = 32  # pixels of a side; larger pictures are scaled down


class StyleNetwork(nn.Module):
    """Three convolutions from pictures to 4 × 4 patches of width 64, and a head that predicts measures of style.

    Args:
        channels: of the pictures.
        measures: that the head predicts while it is trained.
    """

    def __init__(self, channels: int = 1, measures: int = 3) -> None:
        super().__init__()
        widths = (channels, 32, 64, WIDTH)
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.GELU(), nn.AvgPool2d(2)]
        self.body = nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(4))
        self.head = nn.Linear(WIDTH, measures)

    def patches(self, pictures: Tensor) -> Tensor:
        """Return patches (b, 64, 4, 4) of pictures (b, c, height, width) from -1 to 1."""
        if pictures.shape[-1] > LARGEST:
            pictures = F.adaptive_avg_pool2d(pictures, LARGEST)
        return self.body(pictures)

    def forward(self, pictures: Tensor) -> Tensor:
        """Predict measures (b, n) from the mean of the patches of pictures (b, c, height, width)."""
        return self.head(self.patches(pictures).mean((2, 3)))


@dataclass(frozen=True)
class InkProcessor:
    """Extract the ink of pictures of one character, in any colours, filling a square of `size` pixels."""

    size: int
    ink: bool = True

    def __call__(self, images: Iterable[object], *, first: int = 0) -> Tensor:
        """Return ink (b, 1, size, size), 1 on paper of -1; arguments as for `ImageProcessor`."""
        rows = each_image(self._ink, images, first)
        return torch.cat(rows) if rows else torch.zeros(0, 1, self.size, self.size)

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON values."""
        return asdict(self)

    def _ink(self, image: Image) -> Tensor:
        picture = image.convert("L")
        grey = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width)
        # Paper is the median of the edge.
        paper = torch.cat([grey[0], grey[-1], grey[:, 0], grey[:, -1]]).float().median()
        ink = (grey - paper).abs() / 255
        if ink.max() < 0.1:
            raise ImageError("it shows nothing: its brightness hardly changes; give dark ink on light paper")
        ink = ink / ink.max()
        rows, columns = (ink > 0.15).any(1).nonzero()[:, 0], (ink > 0.15).any(0).nonzero()[:, 0]
        ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        # scikit-learn's digits fill the height of their frame and stand in the middle of its width.
        side = max(ink.shape)
        before = (side - ink.shape[1]) // 2, (side - ink.shape[0]) // 2
        after = side - ink.shape[1] - before[0], side - ink.shape[0] - before[1]
        square = F.pad(ink, (before[0], after[0], before[1], after[1]))[None, None]
        return 2 * F.interpolate(square, size=(self.size, self.size), mode="area") - 1


@register_encoder("style")
class StyleEncoder(ImageEncoder):
    """The style of pictures as a memory (b, 16, 64): one token for each of 4 × 4 patches.

    Args:
        network: trained.
        size: pixels of a side, as it was trained.
        device: where it runs, by default the CPU.
    """

    model: StyleNetwork

    def __init__(self, network: StyleNetwork, size: int, device: str | torch.device | None = None) -> None:
        super().__init__(network, InkProcessor(size), device=device)
        self.size = size

    @property
    def channels(self) -> int:
        """Channels of the pixels: 1 or 3."""
        return int(self.model.body[0].in_channels)  # type: ignore[arg-type]

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooled: bool = False) -> StyleEncoder:
        """Load the file for `load_image_encoder`."""
        if pooled:
            raise ConfigError(f"{name} is a StyleEncoder, which gives patches: leave pooled out")
        return cls.load(name, device)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device | None = None) -> StyleEncoder:
        """Read the file of `save`.

        Args:
            path: of the file.
            device: where it runs, by default the CPU.

        Raises:
            AdapterFileError: the file is missing, damaged or something else.
        """
        from safetensors import safe_open

        state = {name: value.float() for name, value in read_weights(path).items()}
        with parse_errors(path, "StyleEncoder, as its save writes them"):
            with safe_open(path, "pt") as file:
                size = json.loads(file.metadata()["style_encoder"])["size"]
            network = StyleNetwork(state["body.0.weight"].shape[1], len(state["head.bias"]))
            network.load_state_dict(state)
            return cls(network, check_int("size", size, at_most=4096), device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the encoder to a safetensors file.

        Args:
            path: of the file.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        from safetensors.torch import save

        state = {name: value.contiguous().cpu() for name, value in self.model.state_dict().items()}
        with replacing(Path(path)) as file:
            file.write(save(state, {"style_encoder": json.dumps({"size": self.size})}))

    def features(self, pixels: Tensor) -> Tensor:
        """Return patches (b, 64, 4, 4) of pixels (b, c, height, width), grey if network or pixels have one channel."""
        if pixels.shape[1] != self.channels:
            pixels = pixels.mean(1, keepdim=True).expand(-1, self.channels, -1, -1)
        return self.model.patches(pixels)

    def _example_pixels(self) -> Tensor:
        return torch.zeros(1, self.channels, LARGEST, LARGEST)
