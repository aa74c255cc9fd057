"""Invariant 84: every kind of picture becomes upright RGB through one function, or an ImageError that says why not."""

from __future__ import annotations

import io
import math
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmattn.encoders import ImageProcessor, load_image
from mmattn.encoders.images import picture_files
from mmattn.errors import ConfigError, ImageError
from tests.encoders.pieces import drawing


def written(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def difference(image: Image.Image, want: Image.Image) -> float:
    """Mean distance of the pixels, 0..255."""
    assert image.mode == want.mode == "RGB"
    assert image.size == want.size
    return float(np.abs(np.asarray(image, dtype=np.float64) - np.asarray(want, dtype=np.float64)).mean())


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


# How a picture must be turned so that a viewer who obeys the tag shows it upright.
BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def with_hidden_colours(image: Image.Image) -> Image.Image:
    """The picture on white, stored with alpha 0 where it is white and nonsense colours under it."""
    rgba = np.asarray(image.convert("RGBA")).copy()
    rgba[:11, :, 3] = 0
    return Image.fromarray(rgba)


class Pipe(io.BytesIO):
    """A file that is read once."""

    def seekable(self) -> bool:
        return False

    def seek(self, *place: int) -> int:
        raise io.UnsupportedOperation


ENCODINGS = {
    "png": lambda image: written(image, "PNG"),
    "jpeg": lambda image: written(image, "JPEG", quality=95, subsampling=0),
    "exif 6": lambda image: written(
        image.transpose(BACK[6]), "JPEG", quality=95, subsampling=0, exif=exif(6).tobytes()
    ),
    "webp": lambda image: written(image, "WEBP", lossless=True),
    "bmp": lambda image: written(image, "BMP"),
    "cmyk tiff": lambda image: written(image.convert("CMYK"), "TIFF"),
    "cmyk jpeg": lambda image: written(image.convert("CMYK"), "JPEG", quality=95, subsampling=0),
    "palette png": lambda image: written(image.quantize(256, dither=Image.Dither.NONE), "PNG"),
    "rgba png": lambda image: written(image.convert("RGBA"), "PNG"),
    "pil": lambda image: image,
    "array": lambda image: np.asarray(image),
    "tensor chw 0..1": lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
    "file": lambda image: io.BytesIO(written(image, "PNG")),
    "pipe": lambda image: Pipe(written(image, "PNG")),
}


@pytest.mark.parametrize("kind", ENCODINGS)
def test_encodings_of_one_picture_are_one_picture(kind: str) -> None:
    """Invariant 84."""
    image = drawing()
    limit = 7 if kind.startswith("palette") else 3  # 256 colours of 2867
    assert difference(load_image(ENCODINGS[kind](image)), image) < limit
    other = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert difference(load_image(ENCODINGS[kind](other)), image) > 20


GREYS = {
    "L png": lambda grey: written(grey, "PNG"),
    "LA png": lambda grey: written(grey.convert("LA"), "PNG"),
    "P png": lambda grey: written(grey.convert("P"), "PNG"),
    "I;16 png": lambda grey: written(Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 100), "PNG"),
    "I;16B tiff": lambda grey: written(Image.fromarray(np.asarray(grey).astype(np.uint16) * 257), "TIFF"),
    "I 0..255": lambda grey: grey.convert("I"),
    "I 0..65535": lambda grey: Image.fromarray(np.asarray(grey).astype(np.int32) * 256 + 100),
    "F 0..255 tiff": lambda grey: written(grey.convert("F"), "TIFF"),
    "F 0..1": lambda grey: Image.fromarray(np.asarray(grey).astype(np.float32) / 255),
    "array (h, w)": lambda grey: np.asarray(grey),
    "array (h, w, 1) float": lambda grey: np.asarray(grey)[..., None] / 255.0,
    "array uint16": lambda grey: np.asarray(grey).astype(np.uint16) * 256 + 100,
    "tensor (1, h, w)": lambda grey: torch.from_numpy(np.array(grey))[None],
    "tensor bf16": lambda grey: (torch.from_numpy(np.array(grey)) / 255).to(torch.bfloat16)[None],
}


@pytest.mark.parametrize("kind", GREYS)
def test_grey_pictures_keep_their_greys(kind: str) -> None:
    grey = drawing().convert("L")
    assert difference(load_image(GREYS[kind](grey)), grey.convert("RGB")) < 1


@pytest.mark.parametrize("orientation", BACK)
@pytest.mark.parametrize("given", ["bytes", "pil"])
def test_exif_orientation_is_applied_once(orientation: int, given: str) -> None:
    """Invariant 84."""
    image = drawing()
    data = written(image.transpose(BACK[orientation]), "PNG", exif=exif(orientation).tobytes())
    source = data if given == "bytes" else Image.open(io.BytesIO(data))
    upright = load_image(source)
    assert difference(upright, image) == 0
    assert difference(load_image(upright), image) == 0


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "1"])
def test_transparent_parts_are_white(mode: str) -> None:
    image = drawing().convert("L").convert("RGB") if mode in ("LA", "L", "1") else drawing()
    if mode == "RGBA":
        source = written(with_hidden_colours(image), "PNG")
    elif mode == "LA":
        source = written(with_hidden_colours(image).convert("LA"), "PNG")
    elif mode == "P":
        source = written(with_hidden_colours(image).quantize(200), "PNG")
    else:  # One colour is declared transparent.
        page = Image.new(mode, (61, 47), 0)
        source = written(page, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    pixels = np.asarray(load_image(source))
    assert (pixels[:11] == 255).all()
    if mode in ("RGBA", "LA", "P"):
        assert np.abs(pixels[11:].astype(int) - np.asarray(image)[11:]).mean() < 8


def test_an_animation_gives_its_first_frame_and_stays_where_it_was() -> None:
    colours = ["red", "lime", "blue", "black"]
    frames = [Image.new("RGB", (13, 7), colour) for colour in colours]
    gif = Image.open(io.BytesIO(written(frames[0], "GIF", save_all=True, append_images=frames[1:])))
    gif.seek(3)
    assert load_image(gif).getpixel((5, 3)) == (255, 0, 0)
    assert gif.tell() == 3
    assert gif.convert("RGB").getpixel((5, 3)) == (0, 0, 0)


def test_what_is_given_stays_as_it_was() -> None:
    image = drawing().convert("RGBA")
    array = np.array(image)
    loaded = load_image(image)
    loaded.putpixel((0, 0), (1, 2, 3))
    assert image.mode == "RGBA"
    assert (np.asarray(image) == array).all()
    plain = drawing()
    load_image(plain).putpixel((0, 0), (1, 2, 3))
    assert plain.getpixel((0, 0)) != (1, 2, 3)


def test_where_both_ends_could_be_channels_tensors_come_channels_first() -> None:
    assert load_image(torch.zeros(3, 7, 4)).size == (4, 7)
    assert load_image(np.zeros((3, 7, 4), np.uint8)).size == (7, 3)
    assert load_image(np.zeros((3, 5, 7), np.uint8)).size == (7, 5)
    assert load_image(torch.zeros(5, 7, 3)).size == (7, 5)


def png(
    width: int, height: int, data: bytes, depth: int = 8, colour: int = 2, transparent: bytes | None = None
) -> bytes:
    """A PNG whose header promises as many pixels as it says, whatever its data hold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    header += b"" if transparent is None else chunk(b"tRNS", transparent)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("action", ["ignore", "error"])
@pytest.mark.parametrize("side", [12_000, 20_000])
def test_too_many_pixels_are_refused_from_the_header(side: int, action: str) -> None:
    warnings.simplefilter(action, Image.DecompressionBombWarning)
    with pytest.raises(ImageError, match=f"{side**2}"):
        load_image(png(side, side, bytes(1000)))


def test_the_pixel_limit_is_the_callers() -> None:
    with pytest.raises(ImageError, match="61 x 47.* has 2867 pixels, more than the limit of 2866.*max_pixels"):
        load_image(drawing(), max_pixels=2866)
    assert load_image(drawing(), max_pixels=2867).size == (61, 47)
    with pytest.raises(ImageError, match="max_pixels"):
        load_image(np.zeros((47, 61), np.uint8), max_pixels=2866)


def closed() -> io.BytesIO:
    file = io.BytesIO(b"x")
    file.close()
    return file


BROKEN = {
    "zero bytes": (b"", "empty"),
    "svg": (b"\n <svg/>", "begins with b.*<svg/>"),
    "html": (b"<!DOCTYPE html><p>404", "begins with b'<!DOCTYPE html>"),
    "noise": (bytes(range(1, 60)), "begins with"),
    "header only": (b"\x89PNG\r\n\x1a\n", "begins with"),
    "cut png": (written(drawing(), "PNG")[:400], r"PNG, 61 x 47.*damaged or cut short"),
    "cut jpeg": (written(drawing(), "JPEG")[:900], r"JPEG, 61 x 47.*damaged or cut short"),
    "cut gif": (written(drawing(), "GIF")[:1200], r"GIF, 61 x 47.*damaged or cut short"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "drawing"),
    "list": ([[1, 2]], "list"),
    "none": (None, "NoneType"),
    "number": (7, "int"),
    "no file": ("no such file.png", "no file"),
    "folder": (".", "folder"),
    "address": ("https://example.org/a.jpg", "nothing is downloaded"),
    "text file": (io.StringIO("abc"), "mode 'rb'"),
    "closed file": (closed(), "the file cannot be read"),
    "NUL in a path": ("a\0b.png", "cannot be read"),
    "floats 0..255": (np.full((5, 7, 3), 200.0), "divide 0..255"),
    "normalised": (torch.linspace(-2, 2, 105).view(3, 5, 7), "mean and std"),
    "NaN": (torch.full((3, 5, 7), math.nan), "nan"),
    "NaN in F": (Image.fromarray(np.full((5, 7), np.nan, np.float32)), "from nan"),
    "F out of range": (Image.fromarray(np.full((5, 7), -3, np.float32)), "from -3"),
    "int64": (np.zeros((5, 7, 3), np.int64), "int64"),
    "two channels": (np.zeros((5, 7, 2), np.uint8), "no axis of 1, 3 or 4"),
    "four axes": (torch.zeros(2, 3, 5, 7), "not one picture"),
    "no pixels": (np.zeros((0, 7, 3), np.uint8), "no pixels"),
    "no width": (Image.new("RGB", (0, 5)), "no pixels"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_picture_is_named(case: str) -> None:
    """Invariant 84."""
    source, words = BROKEN[case]
    with pytest.raises(ImageError, match=f"(?s){words}"):
        load_image(source)


def test_mutated_files_give_pictures_or_image_errors() -> None:
    generator = np.random.default_rng(7)
    outcomes = set()
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"):
        good = written(drawing(23, 19), kind)
        for _ in range(40):
            data = bytearray(good)
            for place in generator.integers(0, len(data), 4):
                data[place] = int(generator.integers(256))
            try:
                outcomes.add(load_image(bytes(data), max_pixels=1_000_000).mode)
            except ImageError:
                outcomes.add("error")
    assert outcomes == {"RGB", "error"}


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
@pytest.mark.parametrize("resize", ["shortest", "longest", "squash"])
def test_odd_shapes_become_pixels(size: tuple[int, int], resize: str) -> None:
    pixels = ImageProcessor(224, resize=resize, fill=255)([Image.new("RGB", size, (255, 0, 0))])
    assert pixels.shape == (1, 3, 224, 224)
    assert torch.isfinite(pixels).all()
    assert (pixels[:, 0] == 1).all()
    assert (pixels[:, 1, 111, 111] == -1).all()


@pytest.mark.parametrize("resize", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("shape", [(61, 47), (47, 61), (300, 211), (29, 29)])
def test_pixels_are_those_of_open_clip(resize: str, shape: tuple[int, int]) -> None:
    from open_clip.transform import image_transform

    image = drawing(*shape)
    theirs = image_transform(29, is_train=False, resize_mode=resize, mean=(0.5,) * 3, std=(0.5,) * 3)
    want, got = theirs(image), ImageProcessor(29, resize=resize)([image])[0]
    assert torch.isfinite(got).all()
    # One grey level at the edge of the cut: they round the long side's length before, we after.
    assert (got - want).abs().max() <= 2.01 / 127.5
    assert (got - want).abs().mean() < 0.1 / 127.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 0}, "size"),
        ({"size": True}, "size"),
        ({"size": (3, 4, 5)}, "size"),
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"mean": None}, "mean"),
        ({"std": 0.0}, "std"),
        ({"resize": "stretch"}, "squash"),
        ({"interpolation": "nearest"}, "bicubic"),
        ({"fill": 256}, "fill"),
    ],
)
def test_settings_are_checked(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ImageProcessor(**settings)


@pytest.mark.parametrize("size", [(1, 80_000_000), (80_000_000, 1), (2, 1 << 19)])
def test_absurd_sides_are_refused_from_the_header(size: tuple[int, int]) -> None:
    """Invariant 136. A side has a limit of its own: rows cost time, however short."""
    with pytest.raises(ImageError, match="a side has at most"):
        load_image(png(*size, bytes(1000)))
    with pytest.raises(ImageError, match="a side has at most"):
        load_image(np.zeros((1 << 19, 1), np.uint8))


@pytest.mark.parametrize("level", [0, 7, 255])
def test_one_transparent_level_is_white(level: int) -> None:
    """Invariant 136. In 8 and 16 bits, grey and in colour."""
    want = np.arange(256)
    want[level] = 255
    ramp = (np.arange(256) * 257).astype(">u2")
    colours = np.repeat(ramp, 3)
    pictures = [
        png(256, 1, b"\0" + bytes(range(256)), 8, 0, struct.pack(">H", level)),
        png(256, 1, b"\0" + ramp.tobytes(), 16, 0, struct.pack(">H", level * 257)),
        png(256, 1, b"\0" + colours.tobytes(), 16, 2, struct.pack(">HHH", *[level * 257] * 3)),
    ]
    for picture in pictures:
        assert np.asarray(load_image(picture))[0, :, 0].tolist() == want.tolist()


@pytest.mark.parametrize("kind", ["meta", "sparse", "quantised"])
def test_tensors_whose_values_cannot_be_read(kind: str) -> None:
    """Invariant 167: alone and in a list, where the message says which one."""
    whole = torch.zeros(3, 5, 7)
    picture = {
        "meta": lambda: whole.to("meta"),
        "sparse": lambda: whole.to_sparse(),
        "quantised": lambda: whole.to(torch.float8_e4m3fn),
    }[kind]()
    with pytest.raises(ImageError, match="no pixels that can be read"):
        load_image(picture)
    with pytest.raises(ImageError, match="picture 1: .*no pixels that can be read"):
        ImageProcessor(5)([torch.zeros(3, 5, 7), picture])


def test_folders_are_searched_below(tmp_path: Path) -> None:
    """Invariant 184: in class folders too, in the order of names; links that lead back end."""
    names = ["b.png", "daisy/0.jpg", "daisy/deep/er/1.PNG", "tulip/2.webp"]
    others = ["daisy/0.txt", ".hidden/3.png", "tulip/.4.png", "__MACOSX/5.png"]
    for name in [*names, *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "daisy" / "back").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "rose").symlink_to(tmp_path / "tulip", target_is_directory=True)
    names.insert(3, "rose/2.webp")
    assert picture_files([tmp_path]) == [str(tmp_path / name) for name in names]
    assert picture_files([tmp_path / "tulip", tmp_path / "b.png"]) == [
        str(tmp_path / names[4]),
        str(tmp_path / names[0]),
    ]
    (tmp_path / "none" / "below").mkdir(parents=True)
    with pytest.raises(ImageError, match="none' has no pictures"):
        picture_files([tmp_path / "none"])
