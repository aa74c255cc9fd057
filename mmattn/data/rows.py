"""Rows of data: what they may hold, and how they are made from keys and values.

For a language model a row is a `text` to be learned, with a `prompt` before it that is only read; for a UNet it is an
`image` to be drawn, with its `text`. What its memory is made of is the same for both: `images` (for a UNet: `example`,
or the picture itself), `passages`, or the file of a saved `Memory`, several of them or none.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from mmattn.errors import ConfigError, ShapeError, TextError, check_choice
from mmattn.memory import Memory
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
    images: tuple[Any, ...] = ()
    passages: tuple[str, ...] = ()
    memory: Any = None
    picture: Any = None
    id: str | None = None
    metadata: Mapping[str, Any] | None = None

    @property
    def has_memory(self) -> bool:
        """True if the row has a memory."""
        return bool(self.images or self.passages or self.memory is not None)

    @property
    def text_length(self) -> int:
        """Characters of prompt and text: rows are grouped into batches by it."""
        return len(self.prompt) + len(self.text)


def make_row(values: Mapping[str, Any], host: str = "language", folder: Path | None = None) -> Row:
    """A row from its keys and values; an empty value is the same as none.

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
    return Row(text, _text(values, "prompt", needed=False), images, passages, memory)


def row_memory(value: object) -> Memory | None:
    """Return the memory of one row: a `Memory`, the file of one, or a table of vectors (m, e), which may be empty."""
    if value is None:
        return None
    if isinstance(value, (str, PathLike)):
        value = Memory.load(value)
    if not isinstance(value, Memory):
        try:
            tokens = torch.as_tensor(value)
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


def text_of_label(label: str, template: str | None = None) -> str:
    """Return the text of a picture of which only the class is known."""
    template = TEMPLATE if template is None else template
    if "{label}" not in template:
        raise ConfigError(
            f"the template must say where the name of the class belongs, with {{label}}; got {template!r}"
        )
    return template.replace("{label}", label)


def _text(values: Mapping[str, Any], key: str, needed: bool) -> str:
    value = values.get(key)
    if value is None and not needed:
        return ""
    if value is None:
        raise ConfigError(f"{key!r} is missing")
    text = _checked(key, value)
    if needed and not text.strip():
        raise ConfigError(f"{key!r} is empty: there would be nothing to learn from it")
    return text


def _texts(values: Mapping[str, Any]) -> Iterable[str]:
    for key in ("passage", "passages"):
        for one in _several(key, values.get(key)):
            if not _checked(key, one).strip():
                raise ConfigError(f"{key!r} has an empty text; leave it out")
            yield one


def _checked(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key!r} must be text, got {value!r:.60} ({type(value).__name__})")
    try:
        return check_text(value)[0]
    except TextError as error:
        raise ConfigError(f"{key!r}: {error}") from error


def _several(key: str, value: object) -> list[Any]:
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, Mapping):
        raise ConfigError(f"{key!r} must be one or a list of them, got an object")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _picture(value: object, folder: Path | None) -> object:
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
