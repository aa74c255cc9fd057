"""JSON read and written strictly: no key twice, no NaN, a bounded size and depth; each write atomic."""

from __future__ import annotations

import codecs
import json
import math
import os
from typing import Any

from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.file_kinds import describe_start, open_regular
from mmattn.storage.files import Path, write_text

MAX_DEPTH = 64
MAX_JSON = 1 << 20


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically.

    Args:
        path: the file to be written.
        value: text, finite numbers, booleans, None, lists, and dicts by text.

    Raises:
        ConfigError: `value` is not plain JSON (NaN, an object, keys that are the same text).
        OSError: the disk is full, the folder is missing or not writable; what was at `path` is unchanged.
    """
    write_text(path, dump_json(os.path.basename(os.fspath(path)), value, indent=2, limit=MAX_JSON).decode() + "\n")


def read_json(path: Path, max_bytes: int = MAX_JSON) -> Any:
    """Read a JSON file strictly: no key twice, no NaN, at most 64 levels.

    Args:
        path: of the file, in UTF-8.
        max_bytes: larger files are refused.

    Raises:
        AdapterFileError: no such file, another kind of file, or JSON that is damaged, too large or too deep.
    """
    with open_regular(path) as (file, size):
        raw = file.read(max_bytes + 1)
    looks = describe_start(raw[:512], size)
    if looks not in ("JSON text", "a text file"):
        raise AdapterFileError(f"cannot read {str(path)!r} as JSON: it looks like {looks}")
    return parse_json(repr(str(path)), raw, max_bytes)


def _nesting(raw: bytes) -> int:
    """How deep brackets nest outside strings, counted up to just over the limit."""
    outside = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    depth = deepest = 0
    for byte in outside.translate(None, bytes(set(range(256)) - set(b"[]{}"))):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            break
    return deepest


def parse_json(what: str, raw: bytes, limit: int) -> Any:
    """Parse JSON strictly: no key twice, no NaN, at most 64 levels.

    Args:
        what: what is parsed, in messages.
        raw: text in UTF-8, with or without a byte-order mark.
        limit: bytes at most.

    Raises:
        AdapterFileError: JSON that is damaged, too large or too deep.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"the key {double!r} stands twice in one object")
        return found

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a finite number")
        return value

    if len(raw) > limit:
        raise AdapterFileError(f"{what} has {len(raw):,} bytes of JSON; at most {limit:,} are read")
    if _nesting(raw) > MAX_DEPTH:
        raise AdapterFileError(f"{what} nests deeper than {MAX_DEPTH} levels")
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode()
        value = json.loads(text, object_pairs_hook=once, parse_constant=finite, parse_float=finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed or saved again
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise AdapterFileError(
            f"{what} is not text in UTF-8 ({error.reason} in line {line}); save it as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(f"{what} is not sound JSON: {error}") from error
    return value


def dump_json(what: str, value: object, limit: int, indent: int | None = None) -> bytes:
    """Encode a value as JSON that `parse_json` reads.

    Args:
        what: what is encoded, in messages.
        value: text, finite numbers, booleans, None, lists, and dicts by text.
        limit: bytes at most.
        indent: spaces of each level; None for one line.

    Raises:
        ConfigError: `value` is not plain JSON, or needs more than `limit` bytes.
    """
    try:
        separators = (",", ":") if indent is None else None
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent, separators=separators)
        raw = text.encode()
        parse_json(what, raw, limit)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} must be plain JSON (text, finite numbers, lists, dicts by text): {error}") from error
    return raw
