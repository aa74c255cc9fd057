"""Files: atomic writes, locks, fingerprints, and the kind of a damaged file for error messages.

A write goes to a temporary file beside the target, which is fsync'ed and renamed over it, and the folder is fsync'ed:
a killed process or a full disk leaves the old file or the new one. What a killed process leaves behind is removed by
the next write into that folder; a lock tells it from the temporary file of a process that still writes.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from os import PathLike
from typing import IO

from mmattn.errors import AdapterFileError

try:
    import fcntl
except ImportError:  # not a POSIX system: a file in use cannot be removed there, which serves as the lock
    fcntl = None  # type: ignore[assignment]

Path = str | PathLike[str]

_TEMPORARY = re.compile(r"\.mmattn-[0-9a-f]{16}\.tmp")


def _open_temporary(folder: str) -> tuple[int, str]:
    """Create and lock a new file in `folder`, with the mode the umask gives."""
    while True:
        path = os.path.join(folder, f".mmattn-{secrets.token_hex(8)}.tmp")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if fcntl is None:
            return handle, path
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes files there either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)  # removed by another writer between its creation and its lock


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files whose writer was killed; those of running writers stay."""
    if fcntl is None:
        return
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    for path in paths:
        with contextlib.suppress(OSError):  # locked by a living writer, or gone already
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk (fsync), where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems cannot, and say so
                raise
        finally:
            os.close(handle)


@contextlib.contextmanager
def lock_folder(folder: Path, *, shared: bool = False, wait: bool | float = True) -> Iterator[None]:
    """Hold a folder among processes and threads; the lock dies with the process."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    end = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(handle, how if wait is True else how | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise BlockingIOError(
                        errno.EWOULDBLOCK, "another process holds this folder; try again later", str(folder)
                    ) from error
                time.sleep(0.005)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    An existing file keeps its mode, and the target of a symbolic link is replaced. OSError leaves `path` as it was.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise IsADirectoryError(
            errno.EISDIR, "a file was to be saved here, and this is a folder; name a file", str(path)
        )
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            errno.ENOENT, "a file was to be saved here, and the folder above does not exist; make it first", str(path)
        )
    handle, temporary = _open_temporary(folder)
    try:
        with open(handle, "wb") as file:
            if os.path.exists(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(temporary, target)
        if fcntl is None:
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(folder)
    remove_leftovers(folder)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically; OSError leaves `path` as it was."""
    raw = text.encode()
    with replacing(path) as file:
        file.write(raw)


# Foreign and damaged files ----------------------------------------------------------------------------------------

_STARTS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch it with: git lfs pull"),
    (b"<", "a page of HTML or XML (a failed download, or an error of a server)"),
    (b"{", "JSON text"),
    (b"[", "JSON text"),
    (b"PK\x03\x04", "a zip archive, such as of torch.save, whose pickles can run code; save it as safetensors"),
    (b"\x80", "a pickle, which can run code; save it as safetensors"),
    (codecs.BOM_UTF16_LE, "text in UTF-16; save it as UTF-8"),
    (codecs.BOM_UTF16_BE, "text in UTF-16; save it as UTF-8"),
)


def guess_file_type(head: bytes, size: int) -> str:
    """Return the kind of a file in words, from its first 512 bytes and its size."""
    if not size:
        return "an empty file"
    if head[8:9] == b"{":
        length = int.from_bytes(head[:8], "little")
        if length > size - 8:
            return f"a truncated safetensors file: a header of {length:,} bytes in a file of {size:,}"
        return "a safetensors file"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if words := next((words for start, words in _STARTS if text.startswith(start)), None):
        return words
    if not head.strip(b"\0"):
        return "nothing but zeros (a crash before the data reached the disk)"
    with contextlib.suppress(UnicodeDecodeError):
        # The head may end within a character.
        if codecs.getincrementaldecoder("utf-8")().decode(head, len(head) == size).isprintable() or b"\n" in head:
            return "a text file"
    return f"no format known here (it begins with {head[:8]!r})"


def describe(path: Path) -> str:
    """Return the kind of the file at a path in words, or why it cannot be read."""
    try:
        with open_regular(path) as (file, size):
            return guess_file_type(file.read(512), size)
    except AdapterFileError as error:
        return str(error)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file and yield it with its size; AdapterFileError for anything that cannot be read."""
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


def file_fingerprint(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def files_below(folder: Path) -> list[str]:
    """Return the files of a folder and of the folders in it, sorted; none that are hidden or that macOS leaves behind.

    Links are followed, but for those that lead back.
    """
    paths: list[str] = []
    trails = {os.fspath(folder): {os.path.realpath(folder)}}  # by folder, those on the way to it
    for place, folders, files in os.walk(os.fspath(folder), followlinks=True):
        paths += [os.path.join(place, name) for name in files if not name.startswith((".", "__"))]
        trail, names = trails.pop(place), [name for name in folders if not name.startswith((".", "__"))]
        targets = {name: os.path.realpath(os.path.join(place, name)) for name in names}
        folders[:] = [name for name, target in targets.items() if target not in trail]
        trails |= {os.path.join(place, name): trail | {targets[name]} for name in folders}
    return sorted(paths)
