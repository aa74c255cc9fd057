"""Rows from files: JSON lines, or a folder of pictures with their texts."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmattn.errors import ConfigError
from mmattn.training.rows import Row, make_row

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
_OTHER_NAMES = {"file": "image", "file_name": "image", "caption": "text"}
_SHOWN = 10
# The marks of UTF-32 first: one of them begins with one of UTF-16.
_WIDE = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_lines(path: str | Path, host: str = "language") -> list[Row]:
    """The rows of a file of JSON lines in UTF-8, with or without a byte-order mark. Empty lines are passed over.

    Args:
        path: of the file; relative paths in it start from its folder.
        host: "language" or "unet": what the rows are for.

    Raises:
        ConfigError: no such file, no rows, or lines that are none; the first ten are named with their numbers.
    """
    return _read(Path(path), lambda given: make_row(given, host, Path(path).parent))


def read_folder(path: str | Path, host: str = "language") -> list[Row]:
    """The rows of a folder of pictures with their texts, given in one of three ways.

    `captions.jsonl` has lines {"file", "caption"}; `metadata.jsonl`, as the image folders of Hugging Face, has lines
    {"file_name", "text"}, and both may have the other keys of a row; otherwise a `.txt` stands beside each picture.
    All of them are in UTF-8, with or without a byte-order mark.

    Args:
        path: of the folder.
        host: "language" or "unet": what the rows are for.

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
            text = _decoded(picture.with_suffix(".txt").read_bytes()).strip()
            rows.append(make_row({"image": str(picture), "text": text}, host))
        except FileNotFoundError:
            problems.append(f"{picture.name}: no {picture.stem}.txt beside it")
        except ConfigError as error:
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
            if number == 1 and (encoding := _wide_encoding(line)):
                raise ConfigError(f"{path} is in {encoding}: save it as UTF-8")
            seen += bool(line.strip())
            try:
                text = _decoded(line).strip()
                if text:
                    rows.append(make(_object(text)))
            except json.JSONDecodeError as error:
                problems.append(f"line {number}: not JSON ({error.msg} at character {error.pos + 1})")
            except (ConfigError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
    _raise_problems(str(path), "lines", problems, seen)
    if not rows:
        raise ConfigError(f"{path} has no rows ({number} lines, all of them empty)")
    return rows


def _object(text: str) -> dict[str, Any]:
    given = json.loads(text, object_pairs_hook=_without_doubles)
    if not isinstance(given, dict):
        raise ConfigError(f"an object {{…}} is expected, got {type(given).__name__}")
    return given


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the key {name!r} stands there twice")
    return dict(pairs)


def _decoded(raw: bytes) -> str:
    """UTF-8 with or without a byte-order mark, and with any line ends.

    Raises:
        ConfigError: another encoding, or a NUL.
    """
    if encoding := _wide_encoding(raw):
        raise ConfigError(f"{encoding} instead of UTF-8: save it as UTF-8")
    if b"\0" in raw:
        raise ConfigError(f"a NUL at byte {raw.index(0) + 1}: UTF-16, or not text; save it as UTF-8")
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _wide_encoding(raw: bytes) -> str | None:
    """The encoding that the byte-order mark of UTF-16 or UTF-32 names."""
    for mark, encoding in _WIDE.items():
        if raw.startswith(mark):
            return encoding
    return None


def _raise_problems(where: str, what: str, problems: list[str], total: int) -> None:
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        listed = "\n  ".join(problems[:_SHOWN])
        raise ConfigError(f"{len(problems)} of {total} {what} of {where} cannot be used:\n  {listed}{more}")
