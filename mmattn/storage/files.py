"""Atomic writes of files.

A write goes to a temporary file beside the target, which is fsync'ed and renamed over it, and the folder is fsync'ed:
a killed process or a full disk leaves the old file or the new one. What a killed process leaves behind is removed by
the next write into that folder; a lock tells it from the temporary file of a process that still writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from os import PathLike
from typing import IO

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
    """Remove the temporary files in a folder whose writer was killed; those of running writers stay.

    Args:
        folder: where files were written.

    Raises:
        OSError: the folder cannot be read.
    """
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
    """Flush the names in a folder to the disk (fsync), where the system can.

    Args:
        folder: where files were written or renamed.

    Raises:
        OSError: the folder cannot be opened or flushed.
    """
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
def lock_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a folder alone among processes and threads; the lock ends with the block, or with the process.

    Args:
        folder: one that is there.
        wait: for another who holds it.

    Raises:
        BlockingIOError: another holds it, and it was not to be waited for.
        OSError: the folder cannot be opened.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which replaces `path` when the block ends without an error.

    The mode of an existing file is kept, and of a symbolic link the target is replaced.

    Args:
        path: the file to be written.

    Raises:
        OSError: the disk is full, the folder is missing or not writable, or `path` is a folder; what was at `path` is
            unchanged.
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
    """Write text as UTF-8, atomically.

    Args:
        path: the file to be written.
        text: its content.

    Raises:
        OSError: the disk is full, the folder is missing or not writable; what was at `path` is unchanged.
    """
    raw = text.encode()
    with replacing(path) as file:
        file.write(raw)
