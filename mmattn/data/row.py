"""Rows of data: their keys and values, and the contents of their memory: pictures, passages, saved memories.

For a language model a row is a `text` to be learned, with a `prompt` before it that is only read; for a UNet it is an
`image` to be drawn, with its `text`. The memory of both is made of `images` (for a UNet: `example`, or the picture
itself), `passages`, or the file of a saved `Memory`, several of them or none.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mmattn.encoders import load_image
from mmattn.encoders.media_files import undecoded
from mmattn.errors import ConfigError, ImageError, ShapeError, TextError, check_choice
from mmattn.memory import Memory
from mmattn.storage.fingerprints import file_fingerprint
from mmattn.tokenization import check_text

KEYS = {
    "language": ("text", "prompt", "image", "images", "passage", "passages", "memory"),
    "unet": ("image", "text", "example", "passage", "passages", "memory"),
}
UNUSED = ("id", "metadata")
"""Keys that any row may have besides."""
TEMPLATE = "A photo of a {label}."
"""The text of a picture in a class folder."""


@dataclass(frozen=True)
class Row:
    """One example to learn from.

    Attributes:
        text: what a language model learns to write, or the prompt of a UNet.
        prompt: what stands before the text and is not learned.
        images: part of the memory: paths, or anything `mmattn.load_image` reads.
        passages: part of the memory: texts.
        memory: part of the memory, after those: a file that `Memory.save` wrote, or a memory of one row.
        picture: what a UNet learns to draw.
        id: name of the row, of an entry of an index for instance.
        metadata: a JSON object with more about the row.
    """

    text: str
    prompt: str = ""
    images: tuple[object, ...] = ()
    passages: tuple[str, ...] = ()
    memory: object = None
    picture: object = None
    id: str | None = None
    metadata: Mapping[str, object] | None = None

    @property
    def has_memory(self) -> bool:
        """True if the row has a memory."""
        return bool(self.images or self.passages or self.memory is not None)

    @property
    def text_length(self) -> int:
        """Characters of prompt and text: rows are grouped into batches by it."""
        return len(self.prompt) + len(self.text)


def make_row(values: Mapping[str, object], host: str = "language", folder: Path | None = None) -> Row:
    """Return a row from its keys and values; an empty value is the same as none.

    Args:
        values: by the keys of `KEYS[host]`, and any of `UNUSED`.
        host: "language" or "unet".
        folder: where relative paths start; None for the working directory.

    Raises:
        ConfigError: unknown or missing keys, values of another kind, or files that are not there.

    >>> make_row({"text": "a cat", "passages": ["Cats purr."]}).passages
    ('Cats purr.',)
    """
    keys = KEYS[check_choice("host", host, tuple(KEYS))]
    check_mapping(values)
    for key in values:
        if key not in keys and key not in UNUSED:
            close = difflib.get_close_matches(str(key), keys, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"unknown key {key!r}{hint}; a row for this host may have: {', '.join(keys)}")
    text = _text(values, "text", needed=host == "language")
    passages = tuple(_texts(values))
    memory = values.get("memory")
    try:
        memory = _file("memory", memory, folder) if isinstance(memory, (str, Path)) else row_memory(memory)
    except ShapeError as error:
        raise ConfigError(f"'memory': {error}") from error
    if host == "unet":
        if values.get("image") is None:
            raise ConfigError("'image' is missing: the picture to be drawn")
        picture = _picture(values["image"], folder)
        examples = _several("example", values.get("example"))
        images = tuple(_picture(one, folder) for one in examples)
        if not (images or passages or memory is not None):
            images = (picture,)
        return Row(text, "", images, passages, memory, picture)
    pictures = [*_several("image", values.get("image")), *_several("images", values.get("images"))]
    images = tuple(_picture(one, folder) for one in pictures)
    metadata = values.get("metadata")
    about = metadata if isinstance(metadata, Mapping) else None
    return Row(text, _text(values, "prompt", needed=False), images, passages, memory, metadata=about)


def check_mapping(row: object) -> None:
    """Refuse rows that are tables, as `datasets` hands them out in the formats of arrow, pandas and polars."""
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"a row must be a dict of its columns, got {type(row).__name__}: take a dataset in another format, "
            "dataset.with_format(None)"
        )


def row_memory(value: object) -> Memory | None:
    """Return the memory of one row: a `Memory`, the file of one, or a table of vectors (m, e), which may be empty."""
    if value is None:
        return None
    if isinstance(value, (str, PathLike)):
        value = Memory.load(value)
    if not isinstance(value, Memory):
        try:
            tokens = _table(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(f"the memory of a row must be vectors (m, e), and this is no table: {error}") from error
        if not tokens.numel():
            return None
        if tokens.dim() != 2:
            raise ShapeError(f"the memory of a row must be vectors (m, e), got {tuple(tokens.shape)}")
        value = Memory(tokens[None].float() if tokens.dtype == torch.float64 else tokens[None])
    if value.batch != 1:
        raise ShapeError(
            f"the memory of a row must have one row, and this one has {value.batch}: select one, memory[i]"
        )
    return value


def _table(value: Any) -> Tensor:
    """Return nested lists, arrays and tensors as a tensor; numpy has ragged rows as an array of arrays."""
    if hasattr(value, "dtype") and not isinstance(value, Tensor):
        value = list(value) if value.dtype.kind == "O" else value.copy()  # torch warns of those that are read-only
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        return torch.stack([_table(one) for one in value])
    return torch.as_tensor(value)


def text_of_label(label: str, template: str | None = None) -> str:
    """Return the text of a picture of which only the class is known."""
    template = TEMPLATE if template is None else template
    if "{label}" not in template:
        raise ConfigError(
            f"the template must say where the name of the class belongs, with {{label}}; got {template!r}"
        )
    return template.replace("{label}", label)


def _text(values: Mapping[str, object], key: str, needed: bool) -> str:
    value = values.get(key)
    if value is None and not needed:
        return ""
    if value is None:
        raise ConfigError(f"{key!r} is missing")
    text = _checked(key, value)
    if needed and not text.strip():
        raise ConfigError(f"{key!r} is empty: there would be nothing to learn from it")
    return text


def _texts(values: Mapping[str, object]) -> Iterable[str]:
    for key in ("passage", "passages"):
        for one in _several(key, values.get(key)):
            text = _checked(key, one)
            if not text.strip():
                raise ConfigError(f"{key!r} has an empty text; leave it out")
            yield text


def _checked(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key!r} must be text, got {value!r:.60} ({type(value).__name__})")
    try:
        return check_text(value)[0]
    except TextError as error:
        raise ConfigError(f"{key!r}: {error}") from error


def _several(key: str, value: object) -> list[object]:
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, Mapping) and undecoded(value) is value:
        raise ConfigError(f"{key!r} must be one or a list of them, got an object")
    kind, dims = getattr(getattr(value, "dtype", None), "kind", ""), getattr(value, "ndim", 0)
    if dims == 4 or (dims == 1 and kind in ("O", "U")):  # pictures of one size, or a list in the format of numpy
        return list(value)  # type: ignore[call-overload]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _picture(value: object, folder: Path | None) -> object:
    value = undecoded(value)
    return _file("image", value, folder) if isinstance(value, (str, Path)) else value


def _file(key: str, value: str | Path, folder: Path | None) -> str:
    if not str(value):
        raise ConfigError(f"{key!r} must be the path of a file, got ''")
    path = (folder or Path()) / value
    try:
        there = path.is_file()
    except ValueError:  # a NUL in the name
        there = False
    if not there:
        raise ConfigError(f"{key!r}: there is no file {str(value)!r}" + (f" in {folder}" if folder else ""))
    return str(path)


# Contents of a memory -------------------------------------------------------------------------------------------------


class RowEncoder(Protocol):
    """An encoder of pictures or passages, each of which becomes a row of a memory."""

    @property
    def dim(self) -> int:
        """Width e of the vectors."""

    @property
    def fingerprint(self) -> str:
        """A fingerprint of weights and settings."""

    def __call__(self, contents: Any, /, *, batch_size: int) -> Memory:
        """Return the memory (n, m, e) of n pictures or passages."""


def encoded_parts(row: Row) -> list[tuple[str, object]]:
    """Return the parts of a row's memory that an encoder reads, in order, each with "pictures" or "passages"."""
    return [*(("pictures", image) for image in row.images), *(("passages", text) for text in row.passages)]


def parts_of(row: Row) -> list[tuple[str, object]]:
    """Return the parts of a row's memory in order, each with its kind, a saved memory included."""
    return encoded_parts(row) + ([] if row.memory is None else [("memories", row.memory)])


def content_key(kind: str, part: object) -> bytes:
    """Return a sha256 of the kind and content of a part."""
    return hashlib.sha256(f"{kind} {content_sha256(kind, part)}".encode()).digest()


def memory_kinds(rows: Iterable[Row]) -> set[str]:
    """Return the kinds of contents of rows: "pictures", "passages", and "memories" that they come with.

    Args:
        rows: what `read_rows` returned, or any sequence of rows; only the latter are gone through.
    """
    declared: set[str] | None = getattr(rows, "memory_kinds", None)
    if declared is not None:
        return declared
    kinds = {kind for row in rows for kind, _ in encoded_parts(row)}
    return kinds | {"memories" for row in rows if row.memory is not None}


def content_sha256(kind: str, part: object) -> str:
    """Return the sha256 of the content of a part, equal for equal files, bytes, texts, arrays or memories."""
    part = undecoded(part)
    if kind == "passages" and isinstance(part, str):
        return hashlib.sha256(part.encode()).hexdigest()
    if isinstance(part, (str, PathLike)):
        return file_fingerprint(part)
    if isinstance(part, (bytes, bytearray)):
        return hashlib.sha256(part).hexdigest()
    if isinstance(part, Memory):
        digest = hashlib.sha256()
        for name in ("tokens", "mask", "segments", "scores"):
            value = getattr(part, name)
            if value is not None:
                value = value.detach().cpu().contiguous()
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()
    if isinstance(part, Tensor):
        part = part.detach().cpu().numpy()
    if not hasattr(part, "tobytes"):
        raise ConfigError(f"a picture must be a path, bytes, a PIL image or an array, got {type(part).__name__}")
    palette = part.getpalette() if hasattr(part, "getpalette") and getattr(part, "mode", "") == "P" else None
    about_it = (getattr(part, "mode", None), getattr(part, "size", None), getattr(part, "shape", None), palette)
    return hashlib.sha256(repr(about_it).encode() + part.tobytes()).hexdigest()


def encode_parts(
    encoder: RowEncoder, parts: Sequence[object], batch_size: int, skip_broken: bool = False
) -> list[Tensor | None]:
    """Return the vectors (m, e) of each part, without padding, on the CPU."""
    try:
        memory = encoder(list(parts), batch_size=batch_size)
        readable = [True] * len(parts)
    except ImageError:
        readable = [why_unreadable(part) is None for part in parts]
        if not skip_broken or all(readable):
            raise
        if not any(readable):
            return [None] * len(parts)
        memory = encoder([part for part, one in zip(parts, readable, strict=True) if one], batch_size=batch_size)
    tokens, mask = memory.tokens.detach().cpu(), None if memory.mask is None else memory.mask.cpu()
    rows = iter(range(memory.batch))
    vectors: list[Tensor | None] = []
    for one in readable:
        row = next(rows) if one else None
        vectors.append(None if row is None else tokens[row] if mask is None else tokens[row][mask[row]])
    return vectors


def why_unreadable(image: object) -> str | None:
    """Return why a picture cannot be read; None where it can."""
    try:
        load_image(image)
    except ImageError as error:
        return str(error)
    return None


def given_memory(memory: object) -> Memory:
    """Return the memory (1, m, e) that a row comes with, in float32."""
    one = row_memory(memory)
    assert one is not None
    scores = None if one.scores is None else one.scores.float()
    return Memory(one.tokens.float(), one.mask, one.segments, scores, check_finite=one.finite_checked)


def encoders_fingerprint(fingerprints: Sequence[str]) -> str | None:
    """Return a fingerprint of one or two encoders together; None where there are none."""
    if len(fingerprints) < 2:
        return fingerprints[0] if fingerprints else None
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()
