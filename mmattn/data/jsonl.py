"""Rows from files of JSON lines, and what is done with those that cannot be used."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.data.rows import Row, make_row
from mmattn.errors import ConfigError

_OTHER_NAMES = {"file": "image", "file_name": "image", "caption": "text"}
_SHOWN = 10
# The marks of UTF-32 first: one of them begins with one of UTF-16.
_WIDE = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class FileRows(list[Row]):
    """Rows of a file or folder.

    Args:
        rows: in order.
        found: what was found, in one line: "180 pictures in 12 class folders".
        left_out: what could not be used, and why.
    """

    def __init__(self, rows: Iterable[Row], found: str, left_out: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.found, self.left_out = found, tuple(left_out)


def read_lines(path: str | Path, host: str = "language", *, skip_broken: bool = False) -> FileRows:
    """The rows of a file of JSON lines in UTF-8, with or without a byte-order mark. Empty lines are passed over.

    In files of the names `captions.jsonl` and `metadata.jsonl`, "file" and "file_name" stand for "image" and "caption"
    for "text".

    Args:
        path: of the file; relative paths in it start from its folder.
        host: "language" or "unet": what the rows are for.
        skip_broken: leave out lines that cannot be used, and name them in `left_out` of the result.

    Raises:
        ConfigError: no such file, no rows, or lines that are none; the first ten are named with their numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    renamed = path.name in ("captions.jsonl", "metadata.jsonl")
    rows, problems, number, seen = [], [], 0, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and (encoding := _wide_encoding(line)):
                raise ConfigError(f"{path} is in {encoding}: save it as UTF-8")
            seen += bool(line.strip())
            try:
                text = read_text(line).strip()
                if text:
                    given = _object(text)
                    rows.append(make_row(_renamed(given) if renamed else given, host, path.parent))
            except json.JSONDecodeError as error:
                problems.append(f"line {number}: not JSON ({error.msg} at character {error.pos + 1})")
            except (ConfigError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
    if not rows and not problems:
        raise ConfigError(f"{path} has no rows ({number} lines, all of them empty)")
    left_out = without_broken(path, "lines", problems, seen, skip_broken)
    return FileRows(rows, f"{len(rows)} rows of {path.name}", [f"{path.name}, {problem}" for problem in left_out])


def without_broken(where: Path, what: str, problems: Sequence[str], total: int, skip_broken: bool) -> Sequence[str]:
    """The problems, if what has them may be left out."""
    if problems and (len(problems) == total or not skip_broken):
        raise ConfigError(f"{len(problems)} of {total} {what} of {where} cannot be used:\n{first_few(problems)}")
    return problems


def first_few(problems: Sequence[str]) -> str:
    """The first ten, a line each, and how many there are besides."""
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "  " + "\n  ".join(problems[:_SHOWN]) + more


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    # The vision recipe writes the species down, too.
    return {_OTHER_NAMES.get(key, key): value for key, value in given.items() if key != "species"}


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


def read_text(raw: bytes) -> str:
    """UTF-8 with or without a byte-order mark, and with any line ends."""
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
