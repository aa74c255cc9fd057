"""Rows of a dataset: their columns, and the memory of each.

For a language model a row is a `text` to be learned, with a `prompt` before it that is only read; for a UNet it is an
`image` to be drawn, with its `text`. The memory of both is made of `images` (for a UNet: `example`, or the picture
itself), `passages`, vectors, or the file of a saved `Memory`, several of them or none.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.base import undecoded
from mmattn.errors import ConfigError, ShapeError, TextError, check_choice
from mmattn.memory import Memory
from mmattn.tokenization import check_text

MEMORY = ("memory", "segments", "scores")
"""Columns of an encoded memory: vectors (m, e), the segment (m,) and the score (m,) of each slot."""
COLUMNS = {
    "language": ("text", "prompt", "image", "images", "passage", "passages", *MEMORY),
    "unet": ("image", "text", "example", "passage", "passages", *MEMORY),
}
ACCEPTED = ("id", "metadata", "sources")
"""Columns that rows for any host may have besides."""

Values = Mapping[str, Any]
"""A row of a dataset, by its columns."""


@dataclass(frozen=True)
class Row:
    """A row with checked columns.

    Attributes:
        text: the text that a language model learns, or the prompt of a UNet.
        prompt: the prompt before the text, without labels.
        images: part of the memory: paths, or anything `mmattn.load_image` reads.
        passages: part of the memory: texts.
        memory: part of the memory, after these: a memory of one row, or its file.
        picture: the picture that a UNet learns to draw.
        metadata: a JSON object with further information.
    """

    text: str
    prompt: str = ""
    images: tuple[object, ...] = ()
    passages: tuple[str, ...] = ()
    memory: Memory | str | None = None
    picture: object = None
    metadata: Mapping[str, object] | None = None

    @property
    def has_memory(self) -> bool:
        """True if the row has a memory."""
        return bool(self.images or self.passages or self.memory is not None)


def make_row(values: Values, host: str = "language", folder: Path | None = None) -> Row:
    """Return a row from its columns; an empty value counts as missing.

    Args:
        values: values by the names in `COLUMNS[host]` and `ACCEPTED`.
        host: "language" or "unet".
        folder: folder of relative paths; None for the working directory.

    Raises:
        ConfigError: unknown or missing columns, values of another type, or missing files.

    >>> make_row({"text": "a cat", "passages": ["Cats purr."]}).passages
    ('Cats purr.',)
    """
    names = COLUMNS[check_choice("host", host, tuple(COLUMNS))]
    check_mapping(values)
    for name in values:
        if name not in names and name not in ACCEPTED:
            raise unknown_column(str(name), names)
    text = _text(values, "text", needed=host == "language" and "text" in values)
    passages = tuple(_passages(values))
    memory = _memory(values, folder)
    if host == "unet":
        if values.get("image") is None:
            raise ConfigError("'image' is missing: the picture to be drawn")
        picture = _picture(values["image"], folder)
        images = tuple(_picture(image, folder) for image in _as_list("example", values.get("example")))
        if not images and not passages and values.get("memory") is None:
            images = (picture,)
        return Row(text, "", images, passages, memory, picture)
    pictures = [*_as_list("image", values.get("image")), *_as_list("images", values.get("images"))]
    images = tuple(_picture(image, folder) for image in pictures)
    metadata = values.get("metadata")
    about = metadata if isinstance(metadata, Mapping) else None
    return Row(text, _text(values, "prompt", needed=False), images, passages, memory, metadata=about)


def unknown_column(name: str, names: Sequence[str]) -> ConfigError:
    """Return the error of a column that rows of a host do not have."""
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ConfigError(f"unknown column {name!r}{hint}; a row for this host may have: {', '.join(names)}")


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


def stack_memories(rows: Iterable[Values | Row]) -> Memory | None:
    """Return the memory (b, m, e) of b rows of a dataset in float32, empty in a row without one.

    Args:
        rows: with a column `memory`, as `encode_dataset` returns them.

    Returns:
        None if no row has a memory.
    """
    memories = [row_memory(row.memory) if isinstance(row, Row) else _memory(row) for row in rows]
    width = next((memory.dim for memory in memories if memory is not None), None)
    if width is None:
        return None
    blank = Memory(torch.zeros(1, 0, width))
    return Memory.stack([blank if memory is None else memory.to(torch.float32) for memory in memories])


def _memory(values: Values, folder: Path | None = None) -> Memory | None:
    """Return the memory of a row with its segments and scores."""
    value = values.get("memory")
    try:
        memory = row_memory(_file("memory", value, folder) if isinstance(value, (str, Path)) else value)
    except ShapeError as error:
        raise ConfigError(f"'memory': {error}") from error
    if memory is None:
        return None
    segments, scores = (values.get(name) for name in ("segments", "scores"))
    if segments is None and scores is None:
        return memory
    return Memory(
        memory.tokens,
        memory.mask,
        memory.segments if segments is None else torch.as_tensor(segments)[None].long(),
        memory.scores if scores is None else torch.as_tensor(scores)[None].float(),
    )


def _table(value: Any) -> Tensor:
    """Return nested lists, arrays and tensors as a tensor; numpy has ragged rows as an array of arrays."""
    if hasattr(value, "dtype") and not isinstance(value, Tensor):
        value = list(value) if value.dtype.kind == "O" else value.copy()  # torch warns of those that are read-only
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        return torch.stack([_table(row) for row in value])
    return torch.as_tensor(value)


def _text(values: Values, name: str, needed: bool) -> str:
    value = values.get(name)
    if value is None and not needed:
        return ""
    if value is None:
        raise ConfigError(f"{name!r} is missing")
    text = _checked(name, value)
    if needed and not text.strip():
        raise ConfigError(f"{name!r} is empty: there would be nothing to learn from it")
    return text


def _passages(values: Values) -> Iterable[str]:
    for name in ("passage", "passages"):
        for passage in _as_list(name, values.get(name)):
            text = _checked(name, passage)
            if not text.strip():
                raise ConfigError(f"{name!r} has an empty text; leave it out")
            yield text


def _checked(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name!r} must be text, got {value!r:.60} ({type(value).__name__})")
    try:
        return check_text(value)[0]
    except TextError as error:
        raise ConfigError(f"{name!r}: {error}") from error


def _as_list(name: str, value: object) -> list[object]:
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, Mapping) and undecoded(value) is value:
        raise ConfigError(f"{name!r} must be one or a list of them, got an object")
    kind, dims = getattr(getattr(value, "dtype", None), "kind", ""), getattr(value, "ndim", 0)
    if dims == 4 or (dims == 1 and kind in ("O", "U")):  # pictures of one size, or a list in the format of numpy
        return list(value)  # type: ignore[call-overload]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _picture(value: object, folder: Path | None) -> object:
    value = undecoded(value)
    return _file("image", value, folder) if isinstance(value, (str, Path)) else value


def _file(name: str, value: str | Path, folder: Path | None) -> str:
    if not str(value):
        raise ConfigError(f"{name!r} must be the path of a file, got ''")
    path = (folder or Path()) / value
    try:
        exists = path.is_file()
    except ValueError:  # a NUL in the name
        exists = False
    if not exists:
        raise ConfigError(f"{name!r}: there is no file {str(value)!r}" + (f" in {folder}" if folder else ""))
    return str(path)
