"""`MemoryStore`: rows with the memories that `encode_rows` made of them, on this machine or at an address."""

from __future__ import annotations

import bisect
import copy
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmattn.data.encoded.blocks import Block, Columns, Entry, Part, StoredRow
from mmattn.data.encoded.manifest import MANIFEST, PLAN, Manifest, StoredEncoder, read_description
from mmattn.data.encoded.shards import (
    check_shard,
    open_shard,
    read_columns,
    read_entry,
    read_vectors,
    shard_name,
)
from mmattn.data.file_folders import FileFolder, is_address
from mmattn.data.open_tensors import TensorFile
from mmattn.errors import AdapterFileError, ConditionError

# Blocks whose texts stay in memory after a row of theirs was asked for.
_TEXTS = 64


class MemoryStore(Sequence[StoredRow]):
    """The rows of a store, each with its memory.

    The texts of a row are read when it is asked for, and its vectors when its memory is: mapped from the file on this
    machine, by their range of bytes at an address. The checksum of a block is compared the first time that its vectors
    are read. Training reads whole blocks ahead: `StoreBatches`.

    Args:
        address: the folder of a store, or an address of fsspec: "s3://bucket/store", "hf://datasets/org/name/store".

    Attributes:
        address: as given.
        manifest: what `store.json` says.

    Raises:
        AdapterFileError: no store is there, or shards are missing or of another size.
        ConditionError: a store that is still being made.
        ConfigError: an address of a kind that fsspec does not know.
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.address, self.folder = os.fspath(address), FileFolder(address)
        self.manifest = _manifest(self.folder)
        shards = self.manifest.shards
        self._places = [(shard, block) for shard, one in enumerate(shards) for block in range(len(one.blocks))]
        self._ends = list(itertools.accumulate(block[0] for one in shards for block in one.blocks))
        self._numbers: Tensor | None = None
        sizes = [len(one.blocks) for one in shards]
        self._first_block = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        self._entry_ends = [list(itertools.accumulate(block[1] for block in one.blocks)) for one in shards]
        self._file = lru_cache(None)(self._open_shard)
        self._columns = lru_cache(_TEXTS)(self._read_columns)

    @property
    def dim(self) -> int:
        """Width e of the memories."""
        return self.manifest.dim

    @property
    def encoders(self) -> dict[Any, StoredEncoder]:
        """What encoded the memories: of "pictures" and "passages", where rows have them."""
        return self.manifest.encoders

    @property
    def fingerprint(self) -> str | None:
        """What identifies the encoders, as `RowMemories.fingerprint` does; None where rows brought their memories."""
        return self.manifest.fingerprint

    @property
    def sha256(self) -> str:
        """What tells these rows from those of any other store, or of another choice of them."""
        digest = hashlib.sha256(self.manifest.model_dump_json().encode())
        if self._numbers is not None:
            digest.update(self._numbers.numpy().tobytes())
        return digest.hexdigest()

    @property
    def memory_kinds(self) -> set[str]:
        """What the memories were made of: "pictures", "passages", "memories" that rows came with."""
        return {*self.encoders, *(["memories"] if self.manifest.given_memories else [])}

    @property
    def row_bytes(self) -> float:
        """Bytes of a row on the disk, on average."""
        return sum(shard.size for shard in self.manifest.shards) / max(1, self._ends[-1] if self._ends else 0)

    @property
    def left_out(self) -> list[str]:
        """What could not be used when the store was made, and why."""
        return [line for source in self.manifest.sources for line in source.left_out]

    @property
    def found(self) -> str:
        """What is in the store, in one line."""
        named = [f"{kind} by {one.name or one.fingerprint[:12]}" for kind, one in self.encoders.items()]
        given = ["memories of their own"] if self.manifest.given_memories else []
        return f"{len(self)} rows of a store ({', '.join([*named, *given, self.manifest.dtype])})"

    def __len__(self) -> int:
        if self._numbers is not None:
            return len(self._numbers)
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return self.select(range(len(self))[number])
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of a store with {len(self)} rows")
        number = range(len(self))[number]
        number = number if self._numbers is None else int(self._numbers[number])
        block = bisect.bisect_right(self._ends, number)
        columns = self._columns(block)
        return StoredRow.of(columns, number - self._ends[block] + len(columns.texts), self._entries)

    def __iter__(self) -> Iterator[StoredRow]:
        return (self[number] for number in range(len(self)))

    def select(self, numbers: Sequence[int] | Tensor) -> MemoryStore:
        """The rows of these numbers, as a store that shares the files of this one.

        Args:
            numbers: of rows, in any order.
        """
        chosen = torch.as_tensor(numbers, dtype=torch.long)
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(self):
            raise IndexError(f"rows {int(chosen.min())} to {int(chosen.max())} of a store with {len(self)} rows")
        found = copy.copy(self)
        found._numbers = chosen if self._numbers is None else self._numbers[chosen]
        return found

    def text_lengths(self) -> list[int]:
        """`Row.text_length` of every row, for which no vectors are read."""
        return [row.text_length for row in self]

    # Blocks ---------------------------------------------------------------------------------------------------------

    def block_rows(self) -> list[Sequence[int]]:
        """Of every block the rows that are of this store, by their numbers in it."""
        starts = [0, *self._ends[:-1]]
        if self._numbers is None:
            return [range(end - start) for start, end in zip(starts, self._ends, strict=True)]
        ordered = self._numbers.sort().values
        cuts = torch.searchsorted(ordered, torch.tensor(self._ends)).tolist()
        found: list[Sequence[int]] = []
        begin = 0
        for start, cut in zip(starts, cuts, strict=True):
            found.append((ordered[begin:cut] - start).tolist())
            begin = cut
        return found

    def read_block(self, number: int) -> Block:
        """A block with all its vectors, read at once; safe in several threads.

        Args:
            number: of the block, over all shards.

        Raises:
            AdapterFileError: it was changed after it was written, or its file is not there any more.
            OSError: the file cannot be reached.
        """
        shard, place = self._places[number]
        file = self._file(shard)
        columns = self._read_columns(number)
        own = range(columns.first, columns.first + len(columns.lengths))
        others = {part for row in columns.parts for part in row if part[0] != shard or part[1] not in own}
        elsewhere = {part: self._entry(part) for part in sorted(others)}
        return Block(shard, columns, read_vectors(file, place), elsewhere)

    def _entry(self, part: Part) -> Entry:
        shard, number = part
        place = bisect.bisect_right(self._entry_ends[shard], number)
        columns = self._columns(self._first_block[shard] + place)
        return read_entry(self._file(shard), place, columns, number)

    def _entries(self, parts: Sequence[Part]) -> list[Entry]:
        return [self._entry(part) for part in parts]

    def _open_shard(self, shard: int) -> TensorFile:
        file = open_shard(self.folder, shard)
        if file.sha256 != self.manifest.shards[shard].sha256:
            raise AdapterFileError(
                f"{self.folder.path(file.name)!r} is not the shard that {MANIFEST} describes: it is of another store, "
                "or was made anew"
            )
        check_shard(file, self.manifest.shards[shard], self.dim, self.manifest.dtype)
        return file

    def _read_columns(self, block: int) -> Columns:
        shard, place = self._places[block]
        counts = self.manifest.shards[shard].blocks[place]
        return read_columns(self._file(shard), shard, place, counts, self._entry_ends)

    def __reduce__(self) -> Any:
        return _opened, (self.address, self._numbers)

    def __repr__(self) -> str:
        return f"MemoryStore(rows={len(self)}, e={self.dim}, {self.manifest.dtype}, shards={len(self.manifest.shards)})"


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a store, whole or not, or an address, where nothing else is read from.

    Args:
        path: or address.
    """
    return is_address(path) or any(os.path.isfile(os.path.join(path, name)) for name in (MANIFEST, PLAN))


def _opened(address: str, numbers: Tensor | None) -> MemoryStore:
    store = MemoryStore(address)
    return store if numbers is None else store.select(numbers)


def _manifest(folder: FileFolder) -> Manifest:
    """What a store holds, of which all shards are there."""
    manifest = read_description(folder, MANIFEST, Manifest)
    if manifest is None:
        if PLAN in folder.sizes:
            raise ConditionError(
                f"the store in {folder.address!r} is not whole yet: wait for those who make it, or start the same "
                "command again, which goes on"
            )
        raise AdapterFileError(f"{folder.address!r} has no {MANIFEST}, so it is no store; `mmattn encode` makes one")
    for number, shard in enumerate(manifest.shards):
        name = shard_name(number)
        if folder.sizes.get(name) != shard.size:
            wrong = "is missing" if name not in folder.sizes else f"has {folder.sizes[name]:,} bytes"
            raise AdapterFileError(
                f"{folder.path(name)!r} {wrong}, and {MANIFEST} says {shard.size:,} bytes: fetch the file again"
            )
    return manifest
