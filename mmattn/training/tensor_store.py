"""Tensors by name in the shards of a folder, which grows while it is read, by any number of processes."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from mmattn.storage.safetensors import read_header, read_tensors, write_tensors

SHARD_BYTES = 128 << 20
# Their names, shapes and checksums stand in the header of a shard, which may have 16 MB.
_SHARD_TENSORS = 16_384
_ENDING = ".safetensors"


class TensorStore:
    """A folder of tensors that are written once each and read by name, in any order.

    They are collected in memory and written a shard at a time, atomically: a killed process loses those of one shard at
    most. A shard is mapped from its file, and its checksums are compared at its first use. Shards that other processes
    write meanwhile are found. Safe in several threads.

    Args:
        folder: of the shards, which is made where it is missing.
        expect_format: the format name of the shards.
        shard_bytes: of the tensors of a shard, and of those that are not yet on the disk.

    Raises:
        OSError: the folder cannot be made or read.
        AdapterFileError: a shard is damaged, or no shard.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = TensorStore(folder, "example")
    ...     _ = store.put("a", torch.arange(3))
    ...     store.flush()
    ...     TensorStore(folder, "example").get("a"), store.get("b")
    (tensor([0, 1, 2]), None)
    """

    def __init__(self, folder: str | os.PathLike[str], expect_format: str, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.expect_format, self.shard_bytes = os.fspath(folder), expect_format, shard_bytes
        os.makedirs(self.folder, exist_ok=True)
        self._lock = threading.RLock()
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: dict[str, str] = {}  # of each tensor
        self._known: set[str] = set()
        self._open: dict[str, Mapping[str, Tensor]] = {}
        self._find_shards()

    def get(self, name: str) -> Tensor | None:
        """A tensor, not to be written to; None where there is none of this name."""
        with self._lock:
            if name in self._pending:
                return self._pending[name]
            if name not in self._shards:
                self._find_shards()
            shard = self._shards.get(name)
            if shard is None:
                return None
            if shard not in self._open:
                path = os.path.join(self.folder, shard)
                self._open[shard], _ = read_tensors(path, self.expect_format, check_finite=False, mapped=True)
            return self._open[shard][name]

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Add a tensor."""
        with self._lock:
            taken = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._pending[name] = taken
            self._pending_bytes += tensor.numel() * tensor.element_size()
            if self._pending_bytes >= self.shard_bytes or len(self._pending) >= _SHARD_TENSORS:
                self.flush()
            return taken

    def flush(self) -> None:
        """Write what is not yet on the disk."""
        with self._lock:
            if not self._pending:
                return
            shard = f"{secrets.token_hex(12)}{_ENDING}"
            write_tensors(os.path.join(self.folder, shard), self._pending, {"format": self.expect_format})
            self._shards |= dict.fromkeys(self._pending, shard)
            self._known.add(shard)
            self._pending, self._pending_bytes = {}, 0

    def nbytes(self) -> int:
        """Bytes of the shards on the disk."""
        with os.scandir(self.folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(_ENDING))

    def __len__(self) -> int:
        """Number of tensors that are known of, those of other processes as far as they were looked for."""
        return len(self._shards) + len(self._pending)

    def _find_shards(self) -> None:
        with os.scandir(self.folder) as entries:
            found = sorted(entry.name for entry in entries if entry.name.endswith(_ENDING))
        for shard in found:
            if shard not in self._known:
                tensors, _ = read_header(os.path.join(self.folder, shard), self.expect_format)
                self._shards |= dict.fromkeys(tensors, shard)
                self._known.add(shard)
