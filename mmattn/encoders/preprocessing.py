"""From images of any kind to the pixel tensor (b, 3, height, width) that a network was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.encoders.images import MAX_PIXELS, as_list, load_image
from mmattn.errors import ConfigError, ImageError, check_choice, check_float, check_int, import_extra

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ImageProcessor:
    """Resizing, cropping and normalisation of images to the pixels that a network was trained on.

    Args:
        size: height and width in pixels, or one number for both.
        mean: of each of the three channels, in 0..1, or one number for all; subtracted.
        std: of each of the three channels, in 0..1, or one number for all; divided by.
        resize: "shortest" side to `size` and centre crop, "longest" side to `size` and padding, or "squash" both.
        interpolation: "bicubic" or "bilinear".
        fill: grey level of the padding, 0..255.

    Raises:
        ConfigError: a setting outside what is allowed.

    >>> ImageProcessor(size=6)([torch.zeros(3, 8, 11), torch.zeros(9, 7)]).shape
    torch.Size([2, 3, 6, 6])
    """

    size: int | Sequence[int] = 224
    mean: float | Sequence[float] = 0.5
    std: float | Sequence[float] = 0.5
    resize: str = "shortest"
    interpolation: str = "bicubic"
    fill: int = 0

    def __post_init__(self) -> None:
        for name, count, check in (("size", 2, check_int), ("mean", 3, check_float), ("std", 3, check_float)):
            value = getattr(self, name)
            values = tuple(value) if isinstance(value, (list, tuple)) else (value,) * count
            if len(values) != count:
                raise ConfigError(f"{name} must be one number or {count} numbers, got {value!r}")
            object.__setattr__(self, name, tuple(check(name, entry) for entry in values))
        if min(self.std) <= 0:  # type: ignore[arg-type]
            raise ConfigError(f"std must be above 0 in every channel, got {self.std}")
        check_choice("resize", self.resize, ("shortest", "longest", "squash"))
        check_choice("interpolation", self.interpolation, ("bicubic", "bilinear"))
        check_int("fill", self.fill, at_least=0, at_most=255)

    def __call__(self, images: Iterable[Any], *, first: int = 0, max_pixels: int = MAX_PIXELS) -> Tensor:
        """Normalised pixels (b, 3, height, width) of b images, float32.

        Args:
            images: of any kind that `load_image` reads.
            first: number of the first image in messages.
            max_pixels: larger images are refused before they are decoded.

        Raises:
            ImageError: an image cannot be read; the message says which one.
        """
        rows = each_image(lambda image: _pixels(self._fitted(image)), images, first, max_pixels)
        pixels = torch.stack(rows) if rows else torch.zeros(0, *self.size, 3, dtype=torch.uint8)  # type: ignore[misc]
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (self.mean, self.std))
        return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std

    def as_dict(self) -> dict[str, Any]:
        """The settings, with lists for tuples as JSON holds them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def _fitted(self, image: Image) -> Image:
        pil = import_extra("PIL.Image", "vision")
        method = getattr(pil.Resampling, self.interpolation.upper())
        width, height = image.size
        rows, columns = self.size  # type: ignore[misc]
        if self.resize == "squash":
            return image.resize((columns, rows), method)
        pick = min if self.resize == "shortest" else max
        ratio = pick(height / rows, width / columns)
        if self.resize == "longest":
            inside = (max(1, min(columns, round(width / ratio))), max(1, min(rows, round(height / ratio))))
            page = pil.new("RGB", (columns, rows), (self.fill,) * 3)
            page.paste(image.resize(inside, method), ((columns - inside[0]) // 2, (rows - inside[1]) // 2))
            return page
        # Cut while resizing: a strip of 1 x 5000 resized first would be a million pixels long.
        to_int = int if rows == columns else round
        wide, tall = max(columns, to_int(width / ratio)), max(rows, to_int(height / ratio))
        left, top = round((wide - columns) / 2) * width / wide, round((tall - rows) / 2) * height / tall
        right, bottom = left + columns * width / wide, top + rows * height / tall
        return image.resize((columns, rows), method, box=(left, top, min(right, width), min(bottom, height)))


def each_image(
    prepare: Callable[[Image], Tensor], images: Iterable[Any], first: int = 0, max_pixels: int = MAX_PIXELS
) -> list[Tensor]:
    """Pixels of each image; what cannot be read is named.

    Args:
        prepare: one image to its pixels.
        images: of any kind that `load_image` reads.
        first: number of the first image in messages.
        max_pixels: larger images are refused before they are decoded.

    Raises:
        ImageError: an image cannot be read; the message says which one.
    """
    rows = []
    for number, image in enumerate(images, start=first):
        try:
            rows.append(prepare(load_image(image, max_pixels=max_pixels)))
        except ImageError as error:
            raise ImageError(f"picture {number}: {error}") from error
    return rows


def preprocess(images: Any, size: int | Sequence[int] = 224, **settings: Any) -> Tensor:
    """Normalised pixels (b, 3, height, width) of one image or several.

    Args:
        images: one image or a list of them, of any kind that `load_image` reads.
        size: height and width in pixels, or one number for both.
        **settings: of `ImageProcessor`.

    Raises:
        ImageError: an image cannot be read; the message says which one.
        ConfigError: a setting outside what is allowed.

    >>> preprocess(torch.zeros(3, 8, 11), size=6).shape
    torch.Size([1, 3, 6, 6])
    """
    return ImageProcessor(size, **settings)(as_list(images))


def _pixels(image: Image) -> Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
