"""`PassageFolder`: a file for each passage that a host has read, shared by processes, within a number of bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from mmattn.adapters.passages import PassageLayers
from mmattn.errors import AdapterFileError
from mmattn.kv_store.greedy_dual import GreedyDual
from mmattn.kv_store.passage_files import read_passages, write_passages
from mmattn.kv_store.passage_selection import Ids, Passage
from mmattn.storage.files import lock_folder, remove_leftovers

SUFFIX = ".safetensors"
Cost = Callable[[int], float]


class PassageFolder:
    """Passages in files, named by a digest of the host's weights, the prefix and their ids.

    A file is renamed to its name when it is whole, and its checksums are compared each time that it is read. Processes
    lock the sub-folder of a passage while they read it with the host, so that each is read by one of them.

    Args:
        path: the folder; it is made.
        max_bytes: of all files; None for no limit.
        host: names the weights and the prefix.
        adapter: for whose layers keys and values are.
        start: tokens of the prefix.
        cost: of reading a passage of so many tokens with the host.
    """

    def __init__(
        self, path: str, max_bytes: int | None, host: str, adapter: PassageLayers, start: int, cost: Cost
    ) -> None:
        self.path, self._host, self._adapter, self._start, self._cost = path, host, adapter, start, cost
        self._budget = GreedyDual[str](max_bytes) if max_bytes is not None else None
        self._times: dict[str, int] = {}  # by file, when a process last used it
        os.makedirs(path, exist_ok=True)
        for shard in self._shards():
            remove_leftovers(shard)

    def __contains__(self, ids: Ids) -> bool:
        """Return whether there is a file of a passage."""
        return os.path.exists(self._file(ids))

    def use(self, ids: Ids) -> None:
        """Count a use of a passage."""
        if self._budget is not None:
            self._budget.use(self._file(ids))

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
        with contextlib.suppress(OSError):  # another user's file
            os.utime(path)
            self._times[path] = os.stat(path).st_mtime_ns
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
        """Write a passage, if it is worth more than those that go for it; a full disk is a warning."""
        path = self._file(passage.ids)
        try:
            if self._budget is None:
                write_passages(path, [passage], self._digest(passage.ids), self._adapter)
                return
            with lock_folder(self.path):
                self._look(self._budget)
                # The header names each tensor in less than 256 bytes.
                nbytes = passage.nbytes() + 8 * len(passage.ids) + 512 * (len(self._adapter.layers) + 4)
                victims = self._budget.add(path, nbytes, self._cost(len(passage.ids)))
                if victims is not None:
                    for victim in victims:
                        Path(victim).unlink(missing_ok=True)
                    write_passages(path, [passage], self._digest(passage.ids), self._adapter)
        except OSError as error:
            warnings.warn(f"a passage was not written to {self.path!r}: {error}", RuntimeWarning, stacklevel=2)

    def _look(self, budget: GreedyDual[str]) -> None:
        """Bring the budget up to the files that are there; one that another process has used since is used."""
        files: dict[str, tuple[int, float]] = {}
        for entry in (entry for shard in self._shards() for entry in os.scandir(shard)):
            with contextlib.suppress(FileNotFoundError, ValueError):  # not a passage
                state, tokens = entry.stat(), int(entry.name.removesuffix(SUFFIX).partition("-")[2])
                if self._times.get(entry.path) != state.st_mtime_ns:
                    self._times[entry.path] = state.st_mtime_ns
                    budget.use(entry.path)
                files[entry.path] = max(state.st_size, 1), self._cost(tokens)
        budget.set_items(files)

    def _shards(self) -> list[str]:
        return [entry.path for entry in os.scandir(self.path) if entry.is_dir()]

    def _digest(self, ids: Ids) -> str:
        return hashlib.sha256(f"{self._host} {ids}".encode()).hexdigest()

    def _file(self, ids: Ids) -> str:
        digest = self._digest(ids)
        return os.path.join(self.path, digest[:2], f"{digest}-{len(ids)}{SUFFIX}")
