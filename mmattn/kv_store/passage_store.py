"""`PassageStore`: the passages used last in memory, within a number of bytes, the others in files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from mmattn.kv_store.passage_folder import PassageFolder
from mmattn.kv_store.passage_selection import Ids, Passage

#: Passages that are read ahead of their use, at most.
AHEAD = 64


class PassageStore:
    """Passages that a host has read; safe in several threads.

    `max_bytes` of keys and values are in memory: on the device that computed them, or out of a file in memory of the
    CPU, which is `pinned` for a host on a CUDA device.
    """

    def __init__(self, max_bytes: int | None, pinned: bool = False) -> None:
        self.folder: PassageFolder | None = None
        self.pinned = pinned
        #: Bytes of keys and values in memory.
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._passages: OrderedDict[Ids, Passage] = OrderedDict()  # the one used last at the end
        self._ahead: dict[Ids, Future[Passage | None]] = {}
        self._loader: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def __contains__(self, ids: Ids) -> bool:
        """Return whether a passage need not be read by the host, unless its file is damaged."""
        return ids in self._passages or (self.folder is not None and ids in self.folder)

    def find(self, ids: Ids) -> Passage | None:
        """Return a passage from memory or its file; None if the host has to read it."""
        if self.folder is not None:
            self.folder.touch(ids)
        with self._lock:
            passage = self._passages.get(ids)
            if passage is not None:
                self._passages.move_to_end(ids)
                return passage
            loading = self._ahead.pop(ids, None)
        if self.folder is None:
            return None
        # What the thread has not begun yet stands behind the passages of other calls.
        passage = loading.result() if loading is not None and not loading.cancel() else self._read(self.folder, ids)
        if passage is not None:
            self._keep(passage, mapped=not self.pinned)
        return passage

    def put(self, passages: Sequence[Passage]) -> None:
        """Write passages that the host has read, and keep them in memory."""
        for passage in passages:
            if self.folder is not None:
                self.folder.write(passage)
            self._keep(passage)

    def prefetch(self, passages: Iterable[Ids]) -> None:
        """Begin to load the files of passages, in a thread."""
        if self.folder is None:
            return
        with self._lock:
            if self._loader is None:
                self._loader = ThreadPoolExecutor(1, "mmattn-passages")
            for ids in passages:
                if ids not in self._passages and ids not in self._ahead:
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
        """Keep a passage in memory, and evict those that were used longest ago; a mapped one is copied."""
        nbytes = passage.nbytes()
        with self._lock:
            if passage.ids in self._passages or (self._max_bytes is not None and nbytes > self._max_bytes):
                return
            while self._max_bytes is not None and self.nbytes + nbytes > self._max_bytes:
                self.nbytes -= self._passages.popitem(last=False)[1].nbytes()
            self._passages[passage.ids] = passage.loaded(pinned=False) if mapped else passage
            self.nbytes += nbytes
