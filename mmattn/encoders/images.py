"""Images of any kind (paths, bytes, PIL, numpy, torch) read as upright 8-bit RGB, and their pixels for a network.

Every image is converted before it is resized (a palette or 16-bit image resized first gives other colours), turned
as its EXIF says, laid on white where it is transparent, and its header is checked before anything is decoded.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, ImageError, check_choice, check_float, check_int, import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 89_478_485
"""Pixels of the largest image that is decoded by default: where Pillow begins to warn, 256 MB as RGB."""
MAX_SIDE = 1 << 18
"""Pixels of the longest side that is decoded: Pillow takes seconds for the rows of 1 x 80,000,000."""

_ACCEPTED = (
    "a path, bytes, an open binary file, a PIL image, a numpy array or a torch tensor "
    "(uint8 or float 0..1, one picture as h w 3 or 3 h w)"
)

_SIGNATURES = (
    (b"<svg", "an SVG drawing: render it to PNG first"),
    (b"<!doctype html", "an HTML page, as a failed download leaves behind"),
    (b"<html", "an HTML page, as a failed download leaves behind"),
    (b"<?xml", "XML (an SVG drawing?): render it to PNG first"),
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself with git lfs pull"),
    (b"%pdf", "a PDF document: render a page to PNG first"),
    (b"%!ps", "a PostScript drawing: render it to PNG first"),
    (b"pk\x03\x04", "a ZIP archive: unpack it first"),
    (b"\x1f\x8b", "gzip data: unpack it first"),
    (b"\x89png", "a PNG file"),
    (b"\xff\xd8\xff", "a JPEG file"),
    (b"gif8", "a GIF file"),
    (b"bm", "a BMP file"),
    (b"ii*\x00", "a TIFF file"),
    (b"mm\x00*", "a TIFF file"),
    (b"{", "JSON text"),
)


def load_image(source: Any, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Read one image of any kind as an upright RGB image of Pillow.

    Of an animation frame 0 is read; transparent parts are laid on white; 16-bit grey is scaled to 8 bits, integer and
    float images by their range (0..1 for floats, 0..255 or 0..65535). ICC profiles are not applied. `source` is left as
    it was.

    Args:
        source: path, bytes, open binary file, PIL image, or numpy array or tensor (height, width),
            (height, width, 1|3|4) or (1|3|4, height, width).
        max_pixels: larger images are refused from their header, before they are decoded.

    Raises:
        ImageError: `source` is no image, is damaged, or is larger than `max_pixels`.
        ConfigError: `max_pixels` is no positive int.
        MissingExtraError: Pillow is not installed.

    >>> load_image(torch.zeros(3, 4, 5)).size
    (5, 4)
    """
    pil = import_extra("PIL.Image", "vision")
    check_int("max_pixels", max_pixels)
    if isinstance(source, pil.Image):
        return _decoded(source, "the PIL image", max_pixels)
    if isinstance(source, Tensor) or hasattr(source, "__array_interface__"):
        return _from_array(source, max_pixels)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _opened(bytes(source), "the bytes", max_pixels)
    if hasattr(source, "read"):
        return _from_file(source, max_pixels)
    if isinstance(source, (str, os.PathLike)):
        return _from_path(os.fspath(source), max_pixels)
    raise ImageError(f"a picture was expected, got {type(source).__name__}; give {_ACCEPTED}")


def as_list(images: Any) -> list[Any]:
    """Return one image, an iterable of images, or an array (b, ...) of them as a list."""
    pil = import_extra("PIL.Image", "vision")
    if isinstance(images, (str, bytes, bytearray, memoryview, os.PathLike, pil.Image)) or hasattr(images, "read"):
        return [images]
    if isinstance(images, Tensor) or hasattr(images, "__array_interface__"):
        return list(images) if len(images.shape) == 4 else [images]
    if isinstance(images, Iterable) and not isinstance(images, (dict, set, frozenset)):
        return list(images)
    raise ImageError(f"pictures were expected, got {type(images).__name__}; give {_ACCEPTED}, or a list of these")


def picture_files(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return files as they are, and the picture files of folders in the order of their names."""
    formats = import_extra("PIL.Image", "vision").registered_extensions()
    endings = {ending for ending, kind in formats.items() if kind != "PDF"}
    files: list[str] = []
    for path in (os.fspath(item) for item in paths):
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if os.path.splitext(name)[1].lower() in endings)
            if not names:
                raise ImageError(f"the folder {path!r} has no pictures; name one that has, or the pictures themselves")
            files += [os.path.join(path, name) for name in names]
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise ImageError(f"there is no file {path!r}: name a picture, or a folder of pictures")
    return files


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
        """Return normalised pixels (b, 3, height, width) of b images, float32.

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


def each_image(
    prepare: Callable[[Image], Tensor], images: Iterable[Any], first: int = 0, max_pixels: int = MAX_PIXELS
) -> list[Tensor]:
    """Return `prepare(image)` of each image; errors name the image, counted from `first`."""
    rows = []
    for number, image in enumerate(images, start=first):
        try:
            rows.append(prepare(load_image(image, max_pixels=max_pixels)))
        except ImageError as error:
            raise ImageError(f"picture {number}: {error}") from error
    return rows


def preprocess(images: Any, size: int | Sequence[int] = 224, **settings: Any) -> Tensor:
    """Return normalised pixels (b, 3, height, width) of one image or several.

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


def _from_path(path: str | bytes, max_pixels: int) -> Image:
    name = os.fsdecode(path)
    if name.lower().startswith(("http://", "https://", "data:", "s3://", "gs://")):
        raise ImageError(f"{name[:80]!r} is an address, and nothing is downloaded here; give the path of a file")
    label = repr(name if len(name) <= 200 else name[:200] + "…")
    try:
        with open(path, "rb") as file:
            return _opened(file, label, max_pixels)
    except FileNotFoundError:
        raise ImageError(f"there is no file {label}") from None
    except IsADirectoryError:
        raise ImageError(f"{label} is a folder; give the paths of the pictures in it") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{label} cannot be read: {error}") from error


def _from_file(file: Any, max_pixels: int) -> Image:
    try:
        if not hasattr(file, "seekable") or file.seekable():
            file.seek(0)
        data = file.read()
    except (OSError, ValueError, AttributeError) as error:
        raise ImageError(f"the file cannot be read: {error}") from error
    if not isinstance(data, bytes):
        raise ImageError(f"the file reads as {type(data).__name__}; open it with mode 'rb'")
    return _opened(data, "the file", max_pixels)


def _opened(data: Any, name: str, max_pixels: int) -> Image:
    pil = import_extra("PIL.Image", "vision")
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    head = file.read(512)
    file.seek(0)
    if not head:
        raise ImageError(f"{name} is empty (0 bytes), no picture")
    try:
        image = pil.open(file)
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
        raise ImageError(
            f"{name} is too large: {error}. The limit here is {max_pixels} pixels; shrink the picture first"
        ) from error
    except Exception as error:  # Pillow lets any error of its readers through.
        raise ImageError(f"{name} cannot be read as a picture; it {_looks_like(head)}") from error
    if image.format in ("EPS", "WMF"):
        raise ImageError(f"{name} is a drawing ({image.format}), not a picture; render it to PNG first")
    return _decoded(image, name, max_pixels)


def _decoded(image: Image, name: str, max_pixels: int) -> Image:
    pil = import_extra("PIL.Image", "vision")
    width, height = image.size
    kind = image.format or f"mode {image.mode}"
    if width * height > max_pixels:
        raise ImageError(
            f"{name} ({kind}) is {width} x {height} = {width * height} pixels, more than the limit of {max_pixels}; "
            "shrink it first, or raise max_pixels"
        )
    if not width * height:
        raise ImageError(f"{name} is {width} x {height}: it has no pixels")
    if max(width, height) > MAX_SIDE:
        raise ImageError(
            f"{name} ({kind}) is {width} x {height}: a side has at most {MAX_SIDE:,} pixels; cut it into pictures"
        )
    try:
        frame = image.tell()
        try:
            if frame:
                image.seek(0)
            image.load()
            upright = _rgb(image)
            orientation = _orientation(image)
        finally:
            if frame:
                image.seek(frame)
        if orientation is not None:
            upright = upright.transpose(orientation)
        # A fresh image carries no EXIF, so that it is not turned again when it comes back here.
        clean = pil.new("RGB", upright.size)
        clean.paste(upright)
        return clean
    except ImageError as error:
        raise ImageError(f"{name} ({kind}, {width} x {height}) {error}") from error
    except Exception as error:  # Pillow lets any error of its readers through.
        raise ImageError(f"{name} ({kind}, {width} x {height}) is damaged or cut short: {error}") from error


def _orientation(image: Image) -> Any:
    pil = import_extra("PIL.Image", "vision")
    try:
        value = image.getexif().get(0x0112)
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError, struct.error):
        return None  # Viewers show a picture with unreadable EXIF as it is stored.
    turn = pil.Transpose
    turns = {2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE}
    turns |= {6: turn.ROTATE_270, 7: turn.TRANSVERSE, 8: turn.ROTATE_90}
    return turns.get(value) if isinstance(value, int) else None


def _rgb(image: Image) -> Image:
    pil = import_extra("PIL.Image", "vision")
    if image.mode.startswith(("I", "F")):
        return _grey(import_extra("numpy", "vision").asarray(image), image.info.get("transparency"))
    transparency = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(transparency, tuple) and max(transparency) > 255:
        # 16 bits as in the file, while Pillow keeps the upper 8 of each pixel.
        image = image.copy()
        image.info["transparency"] = tuple(level >> 8 for level in transparency)
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        page = pil.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    try:
        return image.convert("RGB")
    except ValueError as error:
        raise ImageError(f"has the colour mode {image.mode}, which cannot become RGB; save it as RGB") from error


def _grey(array: Any, transparency: Any = None) -> Image:
    numpy, pil = import_extra("numpy", "vision"), import_extra("PIL.Image", "vision")
    exact = array.dtype == numpy.uint16 or array.dtype == numpy.dtype(">u2")
    values = array.astype(numpy.float64)
    low, high = values.min(), values.max()
    if not numpy.isfinite(low) or not numpy.isfinite(high):
        raise ImageError("has pixels that are NaN or infinite")
    if low < 0 or high > 65535:
        raise ImageError(f"has pixels from {low:g} to {high:g}; scale them to 0..255 or 0..65535 (floats also to 0..1)")
    if exact or high > 255:
        scale = 65535.0
    else:
        scale = 1.0 if array.dtype.kind == "f" and high <= 1 else 255.0
    levels = (values * (255 / scale)).round().astype(numpy.uint8)
    if isinstance(transparency, int):
        levels[values == transparency] = 255
    return pil.fromarray(levels).convert("RGB")


def _from_array(source: Any, max_pixels: int) -> Image:
    numpy, pil = import_extra("numpy", "vision"), import_extra("PIL.Image", "vision")
    name = f"the {'tensor' if isinstance(source, Tensor) else 'array'} {tuple(source.shape)}"
    if isinstance(source, Tensor):
        tensor = source.detach().cpu()
        array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    else:
        array = numpy.asarray(source)
    channels = (1, 3, 4)
    if array.ndim == 3:
        first, last = array.shape[0] in channels, array.shape[2] in channels
        # Where both ends could be channels, tensors come as (3, h, w) and arrays as (h, w, 3).
        if first and (not last or isinstance(source, Tensor)):
            array = array.transpose(1, 2, 0)
        elif not last:
            raise ImageError(f"{name} has no axis of 1, 3 or 4 channels; give (h, w, 3) or (3, h, w)")
        array = array[..., 0] if array.shape[2] == 1 else array
    elif array.ndim != 2:
        raise ImageError(f"{name} is not one picture; give (h, w, 3) or (3, h, w), several as a list")
    if not array.size:
        raise ImageError(f"{name} has no pixels")
    if array.shape[0] * array.shape[1] > max_pixels:
        raise ImageError(f"{name} has more than {max_pixels} pixels; shrink it first, or raise max_pixels")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= -1e-4 and high <= 1 + 1e-4):
            raise ImageError(
                f"{name} has float values from {low:g} to {high:g}, not 0..1; divide 0..255 by 255, and give pictures "
                "before mean and std are taken off"
            )
        array = (array.astype(numpy.float64).clip(0, 1) * 255).round().astype(numpy.uint8)
    elif array.dtype == numpy.uint16:
        array = (array / 257).round().astype(numpy.uint8)
    elif array.dtype == numpy.bool_:
        array = array.astype(numpy.uint8) * 255
    elif array.dtype != numpy.uint8:
        raise ImageError(f"{name} is {array.dtype}; give uint8 (0..255), uint16, bool or float (0..1)")
    return _decoded(pil.fromarray(numpy.ascontiguousarray(array)), name, max_pixels)


def _looks_like(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in text:
        return f"looks like {_SIGNATURES[0][1]}"
    for signature, words in _SIGNATURES:
        if text.startswith(signature):
            return f"looks like {words}" + (", damaged or cut short" if words.endswith("file") else "")
    if head[4:8] == b"ftyp":
        return f"looks like a video, HEIC or AVIF file (brand {head[8:12]!r}): save it as JPEG or PNG first"
    if not any(byte < 9 or 13 < byte < 32 for byte in head):
        return f"looks like text, beginning {head[:24]!r}"
    return f"begins with the bytes {head[:8]!r}, of no format Pillow knows here"
