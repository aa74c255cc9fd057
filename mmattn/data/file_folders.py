"""Folders on this machine or at an address of fsspec (s3://…, hf://…), whose files are read by ranges of bytes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.files import Path, open_regular


class FileFolder:
    """The files of a folder, listed when it is opened: names to sizes in `sizes`.

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
        """Return the path or address of a file."""
        return f"{self._root.rstrip('/')}/{name}" if self._system is not None else os.path.join(self._root, name)

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Read bytes start to end of a file into a (end - start,) uint8 tensor; safe in several threads."""
        path, end = self.path(name), self.sizes.get(name, 0) if end is None else end
        if self._system is None:
            values = torch.empty(end - start, dtype=torch.uint8)
            with open_regular(path) as (file, _):
                file.seek(start)
                size = file.readinto(values.numpy().data)  # type: ignore[attr-defined]
        else:
            try:
                raw = self._system.cat_file(path, start=start, end=end)
            except FileNotFoundError as error:
                raise AdapterFileError(f"cannot read {path!r}: there is no such file") from error
            size, values = len(raw), torch.empty(len(raw), dtype=torch.uint8)
            values.numpy().data[:] = raw
        if size != end - start:
            raise AdapterFileError(f"cannot read {path!r}: it ends before byte {end:,}, so it is truncated")
        return values

    def mapped(self, name: str) -> Tensor:
        """Map a local file to a (n,) uint8 tensor; writing to it does not change the file."""
        path = self.path(name)
        with open_regular(path) as (_, size):
            return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)

    def _list(self) -> dict[str, int]:
        if self._system is None:
            with os.scandir(self._root) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        files = [one for one in self._system.ls(self._root, detail=True) if one["type"] == "file"]
        return {one["name"].rstrip("/").rsplit("/", 1)[-1]: one["size"] for one in files}


def is_address(path: Path) -> bool:
    """Return True for an address with a scheme, which fsspec reads."""
    return "://" in os.fspath(path)


def _file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, None for this machine's, and the path on it."""
    if not is_address(address):
        return None, address
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{address!r} cannot be read by fsspec: {error}") from error
    local = fsspec.get_filesystem_class("file")
    return (None, root) if isinstance(system, local) else (system, root)
