"""Folders whose files are read by ranges of bytes: on this machine, or at an address of fsspec (s3://…, memory://…)."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.files import Path, open_regular


class FileFolder:
    """The files of a folder, listed when it is opened.

    Args:
        address: the path of a folder, or an address that fsspec reads: "s3://bucket/folder", "hf://datasets/…".

    Attributes:
        address: as text.
        sizes: bytes of each file, by its name.
        is_local: whether the folder lies on this machine, so that its files can be mapped.

    Raises:
        AdapterFileError: there is no such folder.
        ConfigError: an address of a kind that fsspec does not know, or for which a package is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with open(os.path.join(place, "letters"), "w") as file:
    ...         _ = file.write("abcdefg")
    ...     folder = FileFolder(f"file://{place}")
    ...     folder.sizes, bytes(folder.read("letters", 2, 5).tolist())
    ({'letters': 7}, b'cde')
    """

    def __init__(self, address: Path) -> None:
        self.address = os.fspath(address)
        self._system, self._root = _file_system(self.address)
        self.is_local = self._system is None
        try:
            self.sizes = self._list()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise AdapterFileError(f"there is no folder {self.address!r}") from error

    def path(self, name: str) -> str:
        """The path or address of a file.

        Args:
            name: of the file.
        """
        return f"{self._root.rstrip('/')}/{name}" if self._system is not None else os.path.join(self._root, name)

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Bytes of a file, (end - start,) uint8; safe in several threads at once.

        Args:
            name: of the file.
            start: the first byte.
            end: the first byte after them.

        Raises:
            AdapterFileError: the file is not there, or ends before.
            OSError: it cannot be reached.
        """
        path = self.path(name)
        if self._system is None:
            values = torch.empty(end - start, dtype=torch.uint8)
            with open_regular(path) as (file, _):
                got = _read_into(file.fileno(), values.numpy().data, start)
        else:
            try:
                raw = self._system.cat_file(path, start=start, end=end)
            except FileNotFoundError as error:
                raise AdapterFileError(f"cannot read {path!r}: there is no such file") from error
            got, values = len(raw), torch.empty(len(raw), dtype=torch.uint8)
            values.numpy().data[:] = raw
        if got != end - start:
            raise AdapterFileError(f"cannot read {path!r}: it ends before byte {end:,}, so it is truncated")
        return values

    def mapped(self, name: str) -> Tensor:
        """All bytes of a file on this machine, (n,) uint8, of which the system reads those that are used.

        Writing to them does not change the file, and the mapping keeps no file open.

        Args:
            name: of the file.

        Raises:
            AdapterFileError: the file is not there, or cannot be read.
        """
        path = self.path(name)
        with open_regular(path) as (_, size):
            return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)

    def _list(self) -> dict[str, int]:
        if self._system is None:
            with os.scandir(self._root) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        found = self._system.ls(self._root, detail=True)
        return {one["name"].rstrip("/").rsplit("/", 1)[-1]: one["size"] for one in found if one["type"] == "file"}


def is_address(path: Path) -> bool:
    """Whether a path is an address of fsspec, with a scheme before it.

    Args:
        path: or address.
    """
    return "://" in os.fspath(path)


def _file_system(address: str) -> tuple[Any, str]:
    """The file system of an address, None for that of this machine, and the path on it."""
    if not is_address(address):
        return None, address
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{address!r} cannot be read by fsspec: {error}") from error
    local = fsspec.get_filesystem_class("file")
    return (None, root) if isinstance(system, local) else (system, root)


def _read_into(handle: int, buffer: memoryview, start: int) -> int:
    """Read from a place of a file until the buffer is full or the file ends; returns how many bytes."""
    done = 0
    while done < len(buffer):
        if hasattr(os, "preadv"):
            got = os.preadv(handle, [buffer[done:]], start + done)
        else:  # not a POSIX system; the handle is this call's own
            os.lseek(handle, start + done, os.SEEK_SET)
            piece = os.read(handle, min(len(buffer) - done, 1 << 24))
            got = len(piece)
            buffer[done : done + got] = piece
        if not got:
            break
        done += got
    return done
