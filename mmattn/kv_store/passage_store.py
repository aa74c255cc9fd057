"""`PassageStore`: passages in memory within a number of bytes, then in files, loaded ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from mmattn.kv_store.greedy_dual import GreedyDual
from mmattn.kv_store.passage_folder import PassageFolder
from mmattn.kv_store.passage_selection import Ids, Passage

#: Passages that are read ahead of their use, at most.
AHEAD = 64


class PassageStore:
    """Passages that a host has read; safe in several threads.

    `max_bytes` of keys and values are in memory: on the device that computed them, or out of a file in memory of the
    CPU, which is `pinned` for a host on a CUDA device. `cost` is that of reading so many tokens with the host.
    """

    def __init__(self, max_bytes: int | None, cost: Callable[[int], float], pinned: bool = False) -> None:
        self.folder: PassageFolder | None = None
        self.pinned = pinned
        self._budget, self._cost = GreedyDual[Ids](max_bytes), cost
        self._passages: dict[Ids, Passage] = {}
        self._latest: dict[Ids, Passage] = {}  # of the batch that the host has read last, without a place
        self._ahead: dict[Ids, Future[Passage | None]] = {}
        self._loader: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return self._budget.nbytes

    def __contains__(self, ids: Ids) -> bool:
        """Return whether a passage need not be read by the host, unless its file is damaged."""
        return ids in self._passages or (self.folder is not None and ids in self.folder)

    def use(self, ids: Ids) -> None:
        """Count a use of a passage: what is used more often stays longer."""
        self._budget.use(ids)
        if self.folder is not None:
            self.folder.use(ids)

    def find(self, ids: Ids) -> Passage | None:
        """Return a passage from memory or its file; None if the host has to read it."""
        with self._lock:
            passage = self._passages.get(ids)
            if passage is not None:
                return passage
            passage, loading = self._latest.get(ids), self._ahead.pop(ids, None)
        if passage is not None:
            self._keep(passage)
        elif self.folder is not None:
            # What the thread has not begun yet stands behind the passages of other calls.
            passage = loading.result() if loading is not None and not loading.cancel() else self._read(self.folder, ids)
            if passage is not None:
                self._keep(passage, mapped=not self.pinned)
        return passage

    def put(self, passages: Sequence[Passage]) -> None:
        """Write passages that the host has read, and keep those in memory that are worth it."""
        for passage in passages:
            if self.folder is not None:
                self.folder.write(passage)
            self._keep(passage)
        with self._lock:
            self._latest = {passage.ids: passage for passage in passages if passage.ids not in self._passages}

    def prefetch(self, passages: Iterable[Ids]) -> None:
        """Begin to load the files of passages, in a thread."""
        if self.folder is None:
            return
        with self._lock:
            if self._loader is None:
                self._loader = ThreadPoolExecutor(1, "mmattn-passages")
            for ids in passages:
                if ids not in self._passages and ids not in self._latest and ids not in self._ahead:
                    self._ahead[ids] = self._loader.submit(self._read, self.folder, ids)
            while len(self._ahead) > AHEAD:
                self._ahead.pop(next(iter(self._ahead))).cancel()

    def writing(self, passages: Iterable[Ids]) -> AbstractContextManager[None]:
        """Keep other processes from reading these passages with their host inside the block."""
        return nullcontext() if self.folder is None else self.folder.writing(passages)

    def _read(self, folder: PassageFolder, ids: Ids) -> Passage | None:
        """Map the file of a passage; for a device read it into pinned memory, from which it copies without a wait."""
        passage = folder.read(ids)
        return passage.loaded(pinned=True) if passage is not None and self.pinned else passage

    def _keep(self, passage: Passage, mapped: bool = False) -> None:
        """Keep a passage in memory if it is worth more than those that go for it; a mapped one is copied."""
        with self._lock:
            victims = self._budget.add(passage.ids, passage.nbytes(), self._cost(len(passage.ids)))
            if victims is None:
                return
            for victim in victims:
                del self._passages[victim]
            self._passages[passage.ids] = passage.loaded(pinned=False) if mapped else passage
