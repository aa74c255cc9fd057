"""Rows of data: what they may hold, and how they are read from JSON lines or a folder of pictures.

For a language model a row is a `text` to be learned, with a `prompt` before it that is only read; for a UNet it is an
`image` to be drawn, with its `text`. What its memory is made of is the same for both: `images` (for a UNet: `example`,
or the picture itself), `passages`, or the file of a saved `Memory`, several of them or none.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmattn.errors import ConfigError, TextError, check_choice
from mmattn.memory import Memory
from mmattn.tokenization import check_text

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
KEYS = {
    "language": ("text", "prompt", "image", "images", "passage", "passages", "memory"),
    "unet": ("image", "text", "example", "passage", "passages", "memory"),
}
UNUSED = ("id", "metadata")
"""Keys that any row may have besides."""

_OTHER_NAMES = {"file": "image", "file_name": "image", "caption": "text"}
_SHOWN = 10


@dataclass(frozen=True)
class Row:
    """One example to learn from.

    Attributes:
        text: what a language model learns to write, or what a UNet is told.
        prompt: what stands before the text and is not learned.
        images, passages: what the memory is made of; a picture is a path or anything `mmattn.load_image` reads.
        memory: a file that `Memory.save` wrote, or a memory of one row, behind those.
        picture: what a UNet learns to draw.
    """

    text: str
    prompt: str = ""
    images: tuple[Any, ...] = ()
    passages: tuple[str, ...] = ()
    memory: Any = None
    picture: Any = None

    @property
    def remembers(self) -> bool:
        """Whether the row has a memory."""
        return bool(self.images or self.passages or self.memory is not None)

    @property
    def letters(self) -> int:
        """How long its texts are: what batches of like length go by."""
        return len(self.prompt) + len(self.text)


def make_row(given: Mapping[str, Any], host: str = "language", folder: Path | None = None) -> Row:
    """A row from its keys; an empty value is as good as none.

    Args:
        host: "language" or "unet". folder: what relative paths start from.

    Raises:
        ConfigError: unknown or missing keys, values of another kind, or files that are not there.

    >>> make_row({"text": "a cat", "passages": ["Cats purr."]}).passages
    ('Cats purr.',)
    """
    known = KEYS[check_choice("host", host, tuple(KEYS))]
    for key in given:
        if key not in known and key not in UNUSED:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"unknown key {key!r}{hint}; a row for this host may have: {', '.join(known)}")
    text = _text(given, "text", needed=host == "language")
    passages = tuple(_texts(given))
    memory = given.get("memory")
    if memory is not None and not isinstance(memory, Memory):
        memory = _file("memory", memory, folder)
    if host == "unet":
        if given.get("image") is None:
            raise ConfigError("'image' is missing: the picture to be drawn")
        picture = _picture(given["image"], folder)
        examples = _several("example", given.get("example"))
        images = tuple(_picture(one, folder) for one in examples)
        if not (images or passages or memory is not None):
            images = (picture,)
        return Row(text, "", images, passages, memory, picture)
    shown = [*_several("image", given.get("image")), *_several("images", given.get("images"))]
    images = tuple(_picture(one, folder) for one in shown)
    return Row(text, _text(given, "prompt", needed=False), images, passages, memory)


def read_lines(path: str | Path, host: str = "language") -> list[Row]:
    """The rows of a file of JSON lines; paths in it start from its own folder, and empty lines are passed over.

    Raises:
        ConfigError: no such file, no rows, or lines that are none; the first ten are named with their numbers.
    """
    return _read(Path(path), lambda given: make_row(given, host, Path(path).parent))


def read_folder(path: str | Path, host: str = "language") -> list[Row]:
    """The rows of a folder of pictures with their texts, given in one of three ways.

    `captions.jsonl` has lines {"file", "caption"}; `metadata.jsonl`, as the image folders of Hugging Face, has lines
    {"file_name", "text"}, and both may have the other keys of a row; otherwise a `.txt` stands beside each picture.

    Raises:
        ConfigError: no such folder, none of the three, pictures without a text, or broken lines.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    for name in ("captions.jsonl", "metadata.jsonl"):
        if (folder / name).is_file():
            return _read(folder / name, lambda given: make_row(_renamed(given), host, folder))
    pictures = sorted(file for file in folder.rglob("*") if file.suffix.lower() in PICTURES)
    if not pictures:
        raise ConfigError(f"{folder} holds no pictures; they end in {', '.join(sorted(PICTURES))}")
    problems, rows = [], []
    for picture in pictures:
        try:
            text = picture.with_suffix(".txt").read_text(encoding="utf-8").strip()
            rows.append(make_row({"image": str(picture), "text": text}, host))
        except FileNotFoundError:
            problems.append(f"{picture.name}: no {picture.stem}.txt beside it")
        except (ConfigError, UnicodeDecodeError) as error:
            problems.append(f"{picture.stem}.txt: {error}")
    _raise_problems(str(folder), "pictures", problems, len(pictures))
    return rows


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    # The vision recipe writes the species down, too.
    return {_OTHER_NAMES.get(key, key): value for key, value in given.items() if key != "species"}


def _read(path: Path, make: Callable[[dict[str, Any]], Row]) -> list[Row]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    rows, problems, number, seen = [], [], 0, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not line:
                continue
            seen += 1
            try:
                given = json.loads(line.decode("utf-8"))
                if not isinstance(given, dict):
                    raise ConfigError(f"an object {{…}} is expected, got {type(given).__name__}")
                rows.append(make(given))
            except UnicodeDecodeError as error:
                problems.append(f"line {number}: not UTF-8 ({error.reason} at byte {error.start})")
            except json.JSONDecodeError as error:
                problems.append(f"line {number}: not JSON ({error.msg} at character {error.pos + 1})")
            except (ConfigError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
    _raise_problems(str(path), "lines", problems, seen)
    if not rows:
        raise ConfigError(f"{path} has no rows ({number} lines, all of them empty)")
    return rows


def _raise_problems(where: str, what: str, problems: list[str], total: int) -> None:
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        listed = "\n  ".join(problems[:_SHOWN])
        raise ConfigError(f"{len(problems)} of {total} {what} of {where} cannot be used:\n  {listed}{more}")


def _text(given: Mapping[str, Any], key: str, needed: bool) -> str:
    value = given.get(key)
    if value is None and not needed:
        return ""
    if value is None:
        raise ConfigError(f"{key!r} is missing")
    text = _checked(key, value)
    if needed and not text.strip():
        raise ConfigError(f"{key!r} is empty: there would be nothing to learn from it")
    return text


def _texts(given: Mapping[str, Any]) -> Iterable[str]:
    for key in ("passage", "passages"):
        for one in _several(key, given.get(key)):
            if not _checked(key, one).strip():
                raise ConfigError(f"{key!r} has an empty text; leave it out")
            yield one


def _checked(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key!r} must be text, got {value!r:.60} ({type(value).__name__})")
    try:
        return check_text(value)[0]
    except TextError as error:
        raise ConfigError(f"{key!r}: {error}") from error


def _several(key: str, value: Any) -> list[Any]:
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, Mapping):
        raise ConfigError(f"{key!r} must be one or a list of them, got an object")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _picture(value: Any, folder: Path | None) -> Any:
    return _file("image", value, folder) if isinstance(value, (str, Path)) else value


def _file(key: str, value: Any, folder: Path | None) -> str:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ConfigError(f"{key!r} must be the path of a file, got {value!r:.60} ({type(value).__name__})")
    path = (folder or Path()) / value
    try:
        there = path.is_file()
    except ValueError:  # a NUL in the name
        there = False
    if not there:
        raise ConfigError(f"{key!r}: there is no file {str(value)!r}" + (f" in {folder}" if folder else ""))
    return str(path)
