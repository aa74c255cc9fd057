"""Images of any kind (paths, bytes, PIL, numpy, torch) read as upright 8-bit RGB, and the base class of their encoders.

Every image is converted before it is resized (a palette or 16-bit image resized first gives other colours), turned
as its EXIF says, laid on white where it is transparent, and its header is checked before anything is decoded.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import torch
from torch import Tensor, nn

from mmattn.encoders.base import FrozenEncoder, Source, as_list, is_array, load_encoder, open_binary
from mmattn.errors import ConfigError, ImageError, check_choice, check_float, check_int, import_extra
from mmattn.memory import Memory
from mmattn.models.catalogue import find_asset
from mmattn.progress import tracked
from mmattn.storage.files import files_below

if TYPE_CHECKING:
    from numpy import ndarray
    from PIL.Image import Image

MAX_PIXELS = 89_478_485
"""Pixels of the largest image that is decoded by default: where Pillow begins to warn, 256 MB as RGB."""
MAX_SIDE = 1 << 18
"""Pixels of the longest side that is decoded: Pillow takes seconds for the rows of 1 x 80,000,000."""
#: The names of image encoders, for messages.
IMAGE_NAMES = "efficientnet-lite0, timm:NAME, torchvision:NAME, NAME:TAG of open_clip, or a folder of open_clip or timm"
#: Of the short names, that of an image encoder: the stage and the size at which it is small and quick.
_SHORT_NAMES = {"efficientnet-lite0": "timm:efficientnet-lite0:stage=4:size=112"}


def load_image(source: object, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Read an image of any kind as an upright RGB image of Pillow.

    Reads frame 0 of an animation and puts transparent parts on white. Scales 16-bit grey to 8 bits, and integer and
    float images by their range (0..1 for floats, 0..255 or 0..65535). Does not apply ICC profiles. `source` is
    unchanged.

    Args:
        source: path, bytes, open binary file, PIL image, a dict {"bytes": …, "path": …} as `datasets` has it, or numpy
            array or tensor (height, width), (height, width, 1|3|4) or (1|3|4, height, width).
        max_pixels: reject larger images by their header, before decoding.

    Raises:
        ImageError: `source` is not an image, is damaged, or is larger than `max_pixels`.
        ConfigError: `max_pixels` is not a positive int.
        MissingExtraError: Pillow is not installed.

    >>> load_image(torch.zeros(3, 4, 5)).size
    (5, 4)
    """
    pil = import_extra("PIL.Image", "vision")
    check_int("max_pixels", max_pixels)
    if isinstance(source, pil.Image):
        return _decoded(source, "the PIL image", max_pixels)
    if is_array(source):
        name = f"the {'tensor' if isinstance(source, Tensor) else 'array'} {tuple(source.shape)}"
        return _decoded(pil.fromarray(_levels(source, name)), name, max_pixels)
    with open_binary(source, "picture", ImageError) as (file, name):
        return _decoded(_opened(file, name, max_pixels), name, max_pixels)


def image_list(images: object) -> list[object]:
    """Return one image, an iterable of images, or an array (b, ...) of them as a list."""
    return as_list(images, "picture", ImageError, batch_dims=4, single=(import_extra("PIL.Image", "vision").Image,))


def picture_files(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return files as they are, and the picture files in folders, at any depth, in the order of their names."""
    formats = import_extra("PIL.Image", "vision").registered_extensions()
    endings = {ending for ending, kind in formats.items() if kind != "PDF"}
    files: list[str] = []
    for path in (os.fspath(item) for item in paths):
        if os.path.isdir(path):
            pictures = [file for file in files_below(path) if os.path.splitext(file)[1].lower() in endings]
            if not pictures:
                raise ImageError(f"the folder {path!r} has no pictures; name one that has, or the pictures themselves")
            files += pictures
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise ImageError(f"there is no file {path!r}: name a picture, or a folder of pictures")
    return files


def unknown_network(fault: str, name: object, known: Sequence[str]) -> ConfigError:
    """Return the error of a name that a library of networks does not know."""
    near = difflib.get_close_matches(str(name), known, 3)
    advice = f"did you mean {', '.join(near)}?" if near else f"encoders of images are {IMAGE_NAMES}"
    return ConfigError(f"{fault} {name!r}; {advice}")


class PixelProcessor(Protocol):
    """From images to the pixels of a network, with settings for its fingerprint."""

    def __call__(self, images: Iterable[object], *, first: int = 0) -> Tensor: ...

    def as_dict(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class ImageProcessor:
    """Resize, crop and normalise images to the pixels that a network was trained on.

    Args:
        size: height and width in pixels, or one number for both.
        mean: of each of the three channels, in 0..1, or one number for all; subtracted.
        std: of each of the three channels, in 0..1, or one number for all; divided by.
        resize: "shortest" side to `size` and centre crop, "longest" side to `size` and padding, or "squash" both.
        interpolation: "bicubic" or "bilinear".
        fill: grey level of the padding, 0..255.

    Raises:
        ConfigError: a setting that is not allowed.

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

    def __call__(self, images: Iterable[object], *, first: int = 0) -> Tensor:
        """Return normalised pixels (b, 3, height, width) of b images, float32.

        Args:
            images: of any kind that `load_image` reads.
            first: number of the first image in messages.

        Raises:
            ImageError: an image cannot be read; the message says which one.
        """
        rows = each_image(lambda image: _pixels(self._fitted(image)), images, first)
        pixels = torch.stack(rows) if rows else torch.zeros(0, *self.size, 3, dtype=torch.uint8)  # type: ignore[misc]
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (self.mean, self.std))
        return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON values."""
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


def each_image(prepare: Callable[[Image], Tensor], images: Iterable[object], first: int = 0) -> list[Tensor]:
    """Return `prepare(image)` of each image; errors name the image, counted from `first`."""
    rows = []
    for number, image in enumerate(images, start=first):
        try:
            rows.append(prepare(load_image(image)))
        except ImageError as error:
            raise ImageError(f"picture {number}: {error}") from error
    return rows


def _pixels(image: Image) -> Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def _opened(file: BinaryIO, name: str, max_pixels: int) -> Image:
    pil = import_extra("PIL.Image", "vision")
    try:
        image: Image = pil.open(file)
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
        raise ImageError(
            f"{name} is too large: {error}. The limit here is {max_pixels} pixels; shrink the picture first"
        ) from error
    except Exception as error:  # Pillow lets any error of its readers through.
        file.seek(0)
        raise ImageError(
            f"{name} cannot be read as a picture: it begins with {file.read(24)!r}; save it as PNG or JPEG"
        ) from error
    if image.format in ("EPS", "WMF"):
        raise ImageError(f"{name} is a drawing ({image.format}), not a picture; render it to PNG first")
    return image


def _decoded(image: Image, name: str, max_pixels: int) -> Image:
    """Return the first frame upright in RGB."""
    width, height = image.size
    name = f"{name} ({image.format or f'mode {image.mode}'}, {width} x {height})"
    if not width * height:
        raise ImageError(f"{name} has no pixels")
    if width * height > max_pixels:
        raise ImageError(
            f"{name} has {width * height} pixels, more than the limit of {max_pixels}; shrink it first, or raise "
            "max_pixels"
        )
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"{name} is too long: a side has at most {MAX_SIDE:,} pixels; cut it into pictures")
    try:
        frame = image.tell()
        try:
            if frame:
                image.seek(0)
            return _rgb(_upright(image))
        finally:
            if frame:
                image.seek(frame)
    except ImageError as error:
        raise ImageError(f"{name} {error}") from error
    except Exception as error:  # Pillow lets any error of its readers through.
        raise ImageError(f"{name} is damaged or cut short: {error}") from error


def _upright(image: Image) -> Image:
    """Return a copy, turned as EXIF says."""
    image.load()
    try:
        upright: Image = import_extra("PIL.ImageOps", "vision").exif_transpose(image)
    except Exception:  # Viewers show a picture with unreadable EXIF as it is stored.
        return image.copy()
    return upright


def _rgb(image: Image) -> Image:
    pil = import_extra("PIL.Image", "vision")
    if image.mode.startswith(("I", "F")):
        return _grey(import_extra("numpy", "vision").asarray(image), image.info.get("transparency"))
    transparency = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(transparency, tuple) and max(transparency) > 255:
        # 16 bits as in the file, while Pillow keeps the upper 8 of each pixel.
        image.info["transparency"] = tuple(level >> 8 for level in transparency)
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        page = pil.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return image.convert("RGB")


def _grey(array: ndarray, transparency: object) -> Image:
    """Return grey levels of 16 bits, ints or floats as RGB."""
    numpy, pil = import_extra("numpy", "vision"), import_extra("PIL.Image", "vision")
    values = array.astype(numpy.float64)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= 65535):
        raise ImageError(f"has pixels from {low:g} to {high:g}; scale them to 0..255 or 0..65535 (floats also to 0..1)")
    scale = (
        65535.0 if array.dtype.itemsize == 2 or high > 255 else 1.0 if array.dtype.kind == "f" and high <= 1 else 255.0
    )
    levels = (values * (255 / scale)).round().astype(numpy.uint8)
    if isinstance(transparency, int):
        levels[values == transparency] = 255
    return pil.fromarray(levels).convert("RGB")


def _levels(source: Tensor | ndarray, name: str) -> ndarray:
    """Return a tensor or array as an array (h, w) or (h, w, c) of 8 bits."""
    numpy = import_extra("numpy", "vision")
    if isinstance(source, Tensor):
        try:
            tensor = source.detach().cpu()
            array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        except (RuntimeError, TypeError) as error:  # on the meta device, sparse, quantised
            raise ImageError(f"{name} has no pixels that can be read: {error}") from error
    else:
        array = numpy.asarray(source)
    array = _channels_last(array, name, isinstance(source, Tensor))
    if not array.size:
        raise ImageError(f"{name} has no pixels")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= -1e-4 and high <= 1 + 1e-4):
            raise ImageError(
                f"{name} has float values from {low:g} to {high:g}, not 0..1; divide 0..255 by 255, and give pictures "
                "before mean and std are taken off"
            )
        array = (array.astype(numpy.float64).clip(0, 1) * 255).round()
    elif array.dtype == numpy.uint16:
        array = (array / 257).round()
    elif array.dtype == numpy.bool_:
        array = array * 255
    elif array.dtype != numpy.uint8:
        raise ImageError(f"{name} is {array.dtype}; give uint8 (0..255), uint16, bool or float (0..1)")
    return numpy.ascontiguousarray(array.astype(numpy.uint8))


def _channels_last(array: ndarray, name: str, is_tensor: bool) -> ndarray:
    """Return an array (h, w), (h, w, 3) or (h, w, 4)."""
    if array.ndim == 3:
        first, last = (array.shape[axis] in (1, 3, 4) for axis in (0, 2))
        # Where both ends could be channels, tensors come as (3, h, w) and arrays as (h, w, 3).
        if first and (not last or is_tensor):
            array = array.transpose(1, 2, 0)
        elif not last:
            raise ImageError(f"{name} has no axis of 1, 3 or 4 channels; give (h, w, 3) or (3, h, w)")
        array = array[..., 0] if array.shape[2] == 1 else array
    elif array.ndim != 2:
        raise ImageError(f"{name} is not one picture; give (h, w, 3) or (3, h, w), several as a list")
    return array


class ImageEncoder(FrozenEncoder):
    """Features of images by a frozen network as a memory (b, m, e): one row per image, one token per patch.

    A network of your own becomes an encoder through a subclass that overrides `features`. `encoder(images).save(path)`
    writes the memory to a file, and `Memory.load(path)` reads it without the network.

    Args:
        model: the network.
        image_processor: from images to the pixels that the network was trained on.
        pooled: one token per image, the mean over its patches (m = 1).
        settings: further content of the fingerprint, besides the image processor and `pooled`.
        device: device of the network, by default the CPU.

    Attributes:
        dim: width e of the memory.
        length: tokens m of each image.
        grid: (height, width) of the patches, or None if they are not laid out in rows and columns.
    """

    grid: tuple[int, int] | None
    _shown = ("dim", "grid", "pooled")

    def __init__(
        self,
        model: nn.Module,
        image_processor: PixelProcessor,
        *,
        pooled: bool = False,
        settings: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(model, settings, device)
        self.image_processor = image_processor
        self.pooled = pooled
        with torch.no_grad():
            tokens, self.grid = self._tokens(self._example_pixels())
        self.length, self.dim = tokens.shape[1:]

    def features(self, pixels: Tensor) -> Tensor:
        """Return the features of pixels, by default the output of the network; subclasses override this method.

        Args:
            pixels: (b, 3, height, width), on the device and in the dtype of the network.

        Returns:
            (b, e, height, width) or (b, m, e), or (b, e) of a pooled network.
        """
        return self.model(pixels)

    def forward(self, images: object, *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory (b, m, e) of b images, computed without gradients.

        `sources` of the memory names the image and the patch of each token: {"image": 0, "patch": [row, column]}.

        Args:
            images: one image or a list of them, of any kind that `load_image` reads.
            batch_size: images that pass the network at once.
            progress: show the progress on stderr.

        Raises:
            ImageError: an image cannot be read; the message says which one.
            ConfigError: `batch_size` is not a positive int.
        """
        check_int("batch_size", batch_size)
        pictures, process = image_list(images), self.image_processor
        # no_grad and not inference_mode: an adapter's backward may keep these tensors.
        with torch.no_grad():
            parts = [
                self._tokens(process(pictures[start : start + batch_size], first=start))[0]
                for start in tracked(len(pictures), "encoding", progress, size=batch_size)
            ]
        tokens = torch.cat(parts) if parts else torch.zeros(0, self.length, self.dim, dtype=self.dtype)
        return Memory(tokens.to(self.device), sources=[self._origin(image) for image in range(len(pictures))])

    def _example_pixels(self) -> Tensor:
        """Return pixels of one image, from which the shape of the features is read."""
        return self.image_processor([torch.zeros(3, 1, 1)])

    def _described(self) -> dict[str, object]:
        return {**self.settings, "preparation": self.image_processor.as_dict(), "pooled": self.pooled}

    def _tokens(self, pixels: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        features = self.features(pixels.to(self.device, self.dtype))
        grid: tuple[int, int] | None
        if features.dim() == 4:
            grid = (features.shape[2], features.shape[3])
            tokens = features.flatten(2).transpose(1, 2)
        else:
            tokens = features[:, None] if features.dim() == 2 else features
            side = round(tokens.shape[1] ** 0.5)
            grid = (side, side) if side * side == tokens.shape[1] else None
        if self.pooled:
            return tokens.mean(1, keepdim=True), (1, 1)
        return tokens.contiguous(), grid

    def _origin(self, image: int) -> list[Source]:
        if self.pooled:
            return [{"image": image}]
        if self.grid is None:
            return [{"image": image, "slot": slot} for slot in range(self.length)]
        return [{"image": image, "patch": list(divmod(slot, self.grid[1]))} for slot in range(self.length)]


def load_image_encoder(name: str, device: str | torch.device | None = None, *, pooled: bool = False) -> ImageEncoder:
    """Load an encoder of images by its name.

    Args:
        name: "efficientnet-lite0", "timm:NAME[:stage=4][:size=112]", "torchvision:NAME[:WEIGHTS FILE]", "NAME:TAG" of
            open_clip, a folder of open_clip or timm, the .safetensors file of a `StyleEncoder`, or "KIND:NAME" of a
            registered encoder.
        device: where it runs.
        pooled: one slot for each image.

    Raises:
        ConfigError: `pooled` for a `StyleEncoder`, or the name of an encoder of other data.
        MissingExtraError: its library is not installed.
        AdapterFileError: there is none of this name.
    """
    name = find_asset(name if os.path.exists(name) else _SHORT_NAMES.get(name, name))
    is_clip = (Path(name) / "open_clip_config.json").is_file()
    is_timm = (Path(name) / "config.json").is_file() and not is_clip
    default = "style" if name.endswith(".safetensors") else "timm" if is_timm else "openclip"
    encoder: ImageEncoder = load_encoder(name, default, ImageEncoder, device, pooled=pooled)
    return encoder
