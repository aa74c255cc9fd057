"""Rows from files: JSON lines, or a folder of pictures with their texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmattn.errors import ConfigError
from mmattn.training.rows import Row, make_row

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
_OTHER_NAMES = {"file": "image", "file_name": "image", "caption": "text"}
_SHOWN = 10


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
