"""`PassageStore`: the passages used last in memory, within a number of bytes, the others in files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.files import check_tensors
from mmattn.adapters.passages import PassageLayers
from mmattn.errors import AdapterFileError
from mmattn.kv_store.passage_slots import Ids, Passage, as_one
from mmattn.storage.files import lock_folder, remove_leftovers
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import read_tensors, write_tensors

PASSAGES = "mmattn-passages"


def write_passages(
    path: str | PathLike[str],
    passages: Sequence[Passage],
    host: str,
    adapter: PassageLayers,
    prefix: Sequence[Passage] = (),
) -> None:
    """Write the prefix and the passages to one file, with the fingerprint of their host."""
    if not passages:
        raise AdapterFileError(f"there are no passages to write to {str(path)!r}: add some first")
    passages = [*prefix, *passages]
    tables = {
        "ids": torch.tensor([token for passage in passages for token in passage.ids]),
        "lengths": torch.tensor([len(passage.ids) for passage in passages]),
    }
    for number, group in enumerate(adapter.groups()):
        for part in ("keys", "values"):
            # Each passage as (layers, m, g, k), so that a file does not depend on which layers are together.
            slots = [as_one(getattr(passage, part)[number]).cpu().transpose(1, 2) for passage in passages]
            for layer, table in zip(group.layers, zip(*slots, strict=True), strict=True):
                tables[f"{part}.{layer}"] = torch.cat(table)
    about: dict[str, object] = {"host": host, "has_windows": any(passage.has_windows for passage in passages)}
    if prefix:
        about["has_prefix"] = True
    write_tensors(path, tables, {"format": PASSAGES, "mmattn_version": __version__, **about})


def read_passages(
    path: str | PathLike[str], host: str, adapter: PassageLayers, vocab_size: int | None = None
) -> tuple[Passage | None, list[Passage]]:
    """Read the prefix and the passages that `write_passages` wrote for the host with this fingerprint.

    Keys and values stay in the file until they are used.

    Raises AdapterFileError if the file is truncated, modified or of another kind, or is from another host.
    """
    with parse_errors(path, "passages"):
        tables, metadata = read_tensors(path, PASSAGES, mapped=True)
        if metadata.get("host") != host:
            raise AdapterFileError(
                f"the passages in {str(path)!r} were read by a host with other weights, config, LoRA or autocast: take "
                "the host that read them, or read them again, PassageCache(model).add(…)"
            )
        has_windows = validated(f"has_windows in {str(path)!r}", bool, metadata.get("has_windows"))
        has_prefix = validated(f"has_prefix in {str(path)!r}", bool, metadata.get("has_prefix", False))
        _check_passages(path, tables, adapter, vocab_size)
        lengths = tables["lengths"].tolist()
        parts = {name: table.split(lengths) for name, table in tables.items() if name != "lengths"}
        groups = adapter.groups()
        passages = [
            Passage(
                tuple(parts["ids"][number].tolist()),
                [[parts[f"keys.{layer}"][number].transpose(0, 1)[None] for layer in group.layers] for group in groups],
                [
                    [parts[f"values.{layer}"][number].transpose(0, 1)[None] for layer in group.layers]
                    for group in groups
                ],
                has_windows,
                lengths[0] if has_prefix and number else 0,
            )
            for number in range(len(lengths))
        ]
        prefix = passages.pop(0) if has_prefix else None
        if len({passage.ids for passage in passages}) != len(passages):
            raise AdapterFileError(f"{str(path)!r} holds a passage twice, and each is read once")
    return prefix, passages


def _check_passages(
    path: str | PathLike[str], tables: Mapping[str, Tensor], adapter: PassageLayers, vocab_size: int | None
) -> None:
    """Refuse tables of passages that this host cannot have read."""
    total = len(tables["ids"])
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "ids": ((total,), torch.int64),
        "lengths": ((tables["lengths"].numel(),), torch.int64),
    }
    for site in adapter.sites:
        assert site.heads is not None
        widths = {"keys": site.heads.head_dim, "values": site.heads.value_dim or site.heads.head_dim}
        for part, width in widths.items():
            kind = tables[f"{part}.{site.layer}"].dtype  # of keys that are rotated wider than of values, under autocast
            expected[f"{part}.{site.layer}"] = ((total, site.heads.num_kv_heads, width), kind)
            if not kind.is_floating_point or kind.itemsize == 1:
                raise AdapterFileError(f"the {part} in {str(path)!r} are {kind}, in which no host computes them")
        if tables[f"keys.{site.layer}"].dtype.itemsize < tables[f"values.{site.layer}"].dtype.itemsize:
            raise AdapterFileError(f"the keys in {str(path)!r} are narrower than the values, which no host computes")
    check_tensors(expected, tables)
    lengths, ids = tables["lengths"], tables["ids"]
    if not len(lengths) or int(lengths.min()) < 1 or int(lengths.max()) > total or int(lengths.sum()) != total:
        raise AdapterFileError(f"the passages in {str(path)!r} are not as long as it says, of {total} tokens in all")
    if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
        raise AdapterFileError(
            f"{str(path)!r} has ids from {int(ids.min())} to {int(ids.max())}, and the vocabulary of this host has "
            f"{vocab_size}"
        )


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
