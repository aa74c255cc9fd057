"""What a file is: recognised by its first bytes, and JSON read and written strictly."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

from mmattn.errors import AdapterFileError, ConfigError

MAX_DEPTH = 64

_STARTS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch it with: git lfs pull"),
    (b"/annex/objects/", "a git-annex pointer, not the file itself"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"BZh", "a bzip2 archive; unpack it first"),
    (b"\xfd7zXZ", "an xz archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it first"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy array"),
    (b"GGUF", "a GGUF file"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"%PDF", "a PDF document"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x7fELF", "a program"),
)


def describe_start(head: bytes, size: int) -> str:
    """What a file of `size` bytes that begins with `head` looks like, in words."""
    if not size:
        return "an empty file"
    for start, words in _STARTS:
        if head.startswith(start):
            return words
    if head.startswith(b"PK\x03\x04"):
        if b".pkl" in head:
            return "a torch.save file (a zip with a pickle inside), which can run code; save it as safetensors"
        return "a zip archive; unpack it first"
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "a pickle, which can run code; save it as safetensors"
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page (a failed download or a login page)"
    if text.startswith(b"<"):
        return "an XML document (an error message of a server?)"
    if text.startswith((b"{", b"[")):
        return "JSON text"
    if not head.strip(b"\0"):
        return "nothing but zeros (a crash before the data reached the disk)"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{":
        if length > size - 8:
            return f"a truncated safetensors file: a header of {length:,} bytes in a file of {size:,}"
        return "a safetensors file"
    with contextlib.suppress(UnicodeDecodeError):
        if head.decode().isprintable() or b"\n" in head:
            return "a text file"
    if size < 8:
        return f"a truncated file: {size} bytes, and a safetensors file has at least 8"
    return f"no format known here (it begins with {head[:8]!r})"


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
    """The value in `raw`; AdapterFileError for what JSON does not allow, and for more than a settings file needs."""

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
        text = raw.decode()
        value = json.loads(text, object_pairs_hook=once, parse_constant=finite, parse_float=finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed or saved again
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(f"{what} is not sound JSON: {error}") from error
    return value


def dump_json(what: str, value: object, limit: int, indent: int | None = None) -> bytes:
    """JSON text that `parse_json` takes back, or a ConfigError."""
    try:
        separators = (",", ":") if indent is None else None
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent, separators=separators)
        raw = text.encode()
        parse_json(what, raw, limit)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} must be plain JSON (text, finite numbers, lists, dicts by text): {error}") from error
    return raw
