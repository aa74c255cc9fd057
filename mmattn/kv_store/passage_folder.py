"""`PassageFolder`: a file for each passage that a host has read, shared by processes, within a number of bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from mmattn.adapters.passages import PassageLayers
from mmattn.errors import AdapterFileError
from mmattn.kv_store.passage_files import read_passages, write_passages
from mmattn.kv_store.passage_selection import Ids, Passage
from mmattn.storage.files import lock_folder, remove_leftovers

SUFFIX = ".safetensors"


class PassageFolder:
    """Passages in files, named by a digest of the host's weights, the prefix and their ids.

    A file is renamed to its name when it is whole, and its checksums are compared each time that it is read. Processes
    lock the sub-folder of a passage while they read it with the host, so that each is read by one of them.

    Args:
        path: the folder; it is made.
        max_bytes: of all files; those that were used longest ago, by any process, are removed. None for no limit.
        host: names the weights and the prefix.
        adapter: for whose layers keys and values are.
        start: tokens of the prefix.
    """

    def __init__(self, path: str, max_bytes: int | None, host: str, adapter: PassageLayers, start: int) -> None:
        self.path, self._max_bytes, self._host, self._adapter, self._start = path, max_bytes, host, adapter, start
        os.makedirs(path, exist_ok=True)
        for shard in self._shards():
            remove_leftovers(shard)

    def __contains__(self, ids: Ids) -> bool:
        """Return whether there is a file of a passage."""
        return os.path.exists(self._file(ids))

    def touch(self, ids: Ids) -> None:
        """Note that a passage is used now, for every process."""
        with contextlib.suppress(OSError):  # no file, or another user's
            os.utime(self._file(ids))

    @contextlib.contextmanager
    def writing(self, passages: Iterable[Ids]) -> Iterator[None]:
        """Keep other processes and threads from reading these passages with their host inside the block."""
        with contextlib.ExitStack() as locks:
            for shard in sorted({os.path.dirname(self._file(ids)) for ids in passages}):  # one order: no deadlock
                os.makedirs(shard, exist_ok=True)
                locks.enter_context(lock_folder(shard))
            yield

    def read(self, ids: Ids) -> Passage | None:
        """Map the file of a passage; None if there is none, or it is damaged, and then it is removed."""
        path = self._file(ids)
        if not os.path.exists(path):
            return None
        try:
            _, passages = read_passages(path, self._digest(ids), self._adapter)
        except AdapterFileError:
            passages = []
        if [passage.ids for passage in passages] == [ids]:
            return replace(passages[0], start=self._start)
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None

    def write(self, passage: Passage) -> None:
        """Write a passage, unless it is larger than all files may be; a full disk is a warning."""
        path = self._file(passage.ids)
        try:
            if self._max_bytes is None:
                write_passages(path, [passage], self._digest(passage.ids), self._adapter)
                return
            # The header names each tensor in less than 256 bytes.
            nbytes = passage.nbytes() + 8 * len(passage.ids) + 512 * (len(self._adapter.layers) + 4)
            if nbytes <= self._max_bytes:
                with lock_folder(self.path):
                    self._evict(self._max_bytes - nbytes)
                    write_passages(path, [passage], self._digest(passage.ids), self._adapter)
        except OSError as error:
            warnings.warn(f"a passage was not written to {self.path!r}: {error}", RuntimeWarning, stacklevel=2)

    def _evict(self, max_bytes: int) -> None:
        """Remove the files that were used longest ago, until the others have at most so many bytes."""
        files: list[tuple[int, int, str]] = []
        for entry in (entry for shard in self._shards() for entry in os.scandir(shard)):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(SUFFIX):
                    files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size

    def _shards(self) -> list[str]:
        return [entry.path for entry in os.scandir(self.path) if entry.is_dir()]

    def _digest(self, ids: Ids) -> str:
        return hashlib.sha256(f"{self._host} {ids}".encode()).hexdigest()

    def _file(self, ids: Ids) -> str:
        digest = self._digest(ids)
        return os.path.join(self.path, digest[:2], f"{digest}{SUFFIX}")
