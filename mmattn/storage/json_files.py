"""JSON read and written strictly: no key twice, no NaN, a bounded size, values of declared types."""

from __future__ import annotations

import codecs
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mmattn.errors import AdapterFileError, ConfigError, MmattnError
from mmattn.storage.files import Path, guess_file_type, open_regular, write_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_JSON = 1 << 20


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically; ConfigError if it is not plain JSON, OSError leaves `path` as it was."""
    write_text(path, dump_json(os.path.basename(os.fspath(path)), value, indent=2, limit=MAX_JSON).decode() + "\n")


def read_json(path: Path, max_bytes: int = MAX_JSON) -> Any:
    """Read a JSON file in UTF-8 strictly; AdapterFileError for any other file, and for damaged or too large JSON."""
    with open_regular(path) as (file, size):
        raw = file.read(max_bytes + 1)
    looks = guess_file_type(raw[:512], size)
    if looks not in ("JSON text", "a text file"):
        raise AdapterFileError(f"cannot read {str(path)!r} as JSON: it looks like {looks}")
    return parse_json(repr(str(path)), raw, max_bytes)


def parse_json(what: str, raw: bytes, limit: int) -> Any:
    """Parse UTF-8 JSON of at most `limit` bytes strictly: no key twice, no NaN."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]] if len(set(keys)) < len(keys) else []
        if twice:
            raise ValueError(f"the key {twice[0]!r} stands twice in one object")
        return dict(pairs)

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a finite number")
        return value

    if len(raw) > limit:
        raise AdapterFileError(f"{what} has {len(raw):,} bytes of JSON; at most {limit:,} are read")
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
    """Encode a value as JSON that `parse_json` reads; ConfigError if it is not plain JSON or too large."""
    try:
        separators = (",", ":") if indent is None else None
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent, separators=separators)
        raw = text.encode()
        parse_json(what, raw, limit)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} must be plain JSON (text, finite numbers, lists, dicts by text): {error}") from error
    return raw


def validated(what: str, kind: Any, value: Any) -> Any:
    """Return a value of parsed JSON, or JSON as bytes, as a type that pydantic knows, strictly.

    In bytes a list may stand for a tuple. `what` names the file in the AdapterFileError for anything else.

    >>> validated("a file", list[int], [3, 5])
    [3, 5]
    """
    from pydantic import ValidationError

    adapter = _adapter(kind)
    try:
        read = adapter.validate_json if isinstance(value, bytes) else adapter.validate_python
        return read(value, strict=True)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        raise AdapterFileError(f"{what} is not what this version reads: {wrong:.500}") from error


@contextmanager
def parse_errors(path: Path, what: str) -> Iterator[None]:
    """Turn errors of the block into an AdapterFileError that `path` holds no sound `what`.

    Checksums say that a file is as it was written, and anybody can write one. Errors of the operating system and
    MemoryError pass through.
    """
    try:
        yield
    except (AdapterFileError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow raises some without one, of what it reads
            raise
        named = str(error) if isinstance(error, MmattnError) else f"{type(error).__name__}: {error}"
        reason = " ".join(named.split())
        raise AdapterFileError(
            f"{str(path)!r} holds no sound {what}: {reason:.300}. Fetch or write it again"
        ) from error


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
