"""Recognition of foreign and damaged files by their first bytes, for error messages; nothing in them is run."""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
from collections.abc import Iterator
from typing import IO

from mmattn.errors import AdapterFileError
from mmattn.storage.files import Path

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
    """The kind of a file in words, by its first bytes.

    Args:
        head: its first bytes, 512 are enough.
        size: of the file in bytes.
    """
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
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "text in UTF-16; save it as UTF-8"
    with contextlib.suppress(UnicodeDecodeError):
        # What is read may end within a character.
        if codecs.getincrementaldecoder("utf-8")().decode(head, len(head) == size).isprintable() or b"\n" in head:
            return "a text file"
    if size < 8:
        return f"a truncated file: {size} bytes, and a safetensors file has at least 8"
    return f"no format known here (it begins with {head[:8]!r})"


def describe(path: Path) -> str:
    """The kind of the file at a path in words, or why it cannot be read.

    Args:
        path: of the file.
    """
    try:
        with open_regular(path) as (file, size):
            return describe_start(file.read(512), size)
    except AdapterFileError as error:
        return str(error)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file for reading, and give it with its size in bytes.

    Args:
        path: of the file.

    Raises:
        AdapterFileError: no such file, a folder, a pipe, a device, or no right to read it.
    """
    try:
        # Not blocking: the file may be a pipe without a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise AdapterFileError(f"cannot read {str(path)!r}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise AdapterFileError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "a folder, and a file is needed" if stat.S_ISDIR(mode) else "not a regular file (a pipe or a device)"
        raise AdapterFileError(f"cannot read {str(path)!r}: it is {kind}")
    with open(handle, "rb") as file:
        yield file, os.fstat(handle).st_size
