"""Folders on this machine or at an address of fsspec (s3://…, hf://…), whose files are read by ranges of bytes."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.files import Path, open_regular


class FileFolder:
    """The files of a folder, listed when it is opened: names to sizes in `sizes`."""

    def __init__(self, address: Path) -> None:
        import fsspec

        self.address = os.fspath(address)
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.address)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{self.address!r} cannot be read by fsspec: {error}") from error
        if not self._system.isdir(self._root):
            raise AdapterFileError(f"there is no folder {self.address!r}")
        self.is_local = isinstance(self._system, fsspec.get_filesystem_class("file"))
        files = [one for one in self._system.ls(self._root, detail=True) if one["type"] == "file"]
        self.sizes = {os.path.basename(one["name"]): one["size"] for one in files}

    def path(self, name: str) -> str:
        """Return the path or address of a file."""
        return f"{self._root.rstrip('/')}/{name}"

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Read bytes start to end of a file into a (end - start,) uint8 tensor; safe in several threads."""
        path, end = self.path(name), self.sizes.get(name, 0) if end is None else end
        try:
            raw = bytearray(self._system.cat_file(path, start=start, end=end))
        except FileNotFoundError as error:
            raise AdapterFileError(f"cannot read {path!r}: there is no such file") from error
        if len(raw) != end - start:
            raise AdapterFileError(f"cannot read {path!r}: it ends before byte {end:,}, so it is truncated")
        return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)

    def mapped(self, name: str) -> Tensor:
        """Map a local file to a (n,) uint8 tensor; writing to it does not change the file."""
        path = self.path(name)
        with open_regular(path) as (_, size):
            return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)


def is_address(path: Path) -> bool:
    """Return True for an address with a scheme, which fsspec reads."""
    return "://" in os.fspath(path)
