"""`EncodedDataset`: rows and the vectors that `encode_rows` made for them, on this machine or at an address."""

from __future__ import annotations

import bisect
import copy
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias, overload

import torch

from mmattn.data.encoded_files import (
    MANIFEST,
    PLAN,
    Array,
    Block,
    EncoderInfo,
    Kind,
    Manifest,
    Vectors,
    lists_of,
    parse_block,
    read_description,
    read_rows_file,
    rows_name,
    rows_schema,
    shard_name,
)
from mmattn.data.row import Row, given_memory
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, import_extra
from mmattn.memory import Memory
from mmattn.storage.files import FileFolder, is_address
from mmattn.storage.json_files import making_sense, parse_json

_RECENT = 16
"""Blocks that stay in memory, or mapped, after a row of theirs was read by its number."""
_MAX_JSON = 256 << 20

Read = Callable[[int], Vectors]
Numbers: TypeAlias = "Sequence[int] | Array"


class EncodedRow(Row):
    """A row of an `EncodedDataset`, whose memory is read each time it is asked for.

    Attributes:
        contents: numbers of the contents that make its memory, equal in rows with equal pictures or passages.
        files: the files of its pictures, as the source named them.
    """

    contents: tuple[int, ...] = ()
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, read: Read, contents: tuple[int, ...], files: tuple[str, ...], **values: object) -> EncodedRow:
        """Return a row whose vectors `read` gives."""
        row = cls.__new__(cls)
        vars(row).update(values, _read=read, contents=contents, files=files)
        return row

    @property
    def memory(self) -> Memory | None:
        """The memory (1, m, e), a segment or more for each content; None in a row without contents."""
        if "_memory" in vars(self):  # of a copy with another text, or of a row that was pickled
            return vars(self)["_memory"]
        memories = [one.memory() for one in self.vectors()]
        return None if not memories else memories[0] if len(memories) == 1 else Memory.cat(memories)

    @memory.setter
    def memory(self, memory: Memory | None) -> None:
        vars(self)["_memory"] = memory

    def vectors(self) -> list[Vectors]:
        """Return the vectors of each content."""
        return [vars(self)["_read"](number) for number in self.contents] if "_read" in vars(self) else []

    def copied(self) -> EncodedRow:
        """Return the row with copies of its vectors, so that it keeps no block in memory."""
        if "_read" not in vars(self):
            return self
        copies = {number: one.copied() for number, one in zip(self.contents, self.vectors(), strict=True)}
        row = copy.copy(self)
        vars(row)["_read"] = copies.__getitem__
        return row

    @property
    def has_memory(self) -> bool:
        """True if the row has a memory."""
        return bool(self.contents) or vars(self).get("_memory") is not None

    def __reduce__(self) -> tuple[object, ...]:
        names = ("text", "prompt", "id", "metadata", "contents", "files")
        return _restored, ({name: getattr(self, name) for name in names} | {"_memory": self.memory},)


def _restored(values: dict[str, object]) -> EncodedRow:
    row = EncodedRow.__new__(EncodedRow)
    vars(row).update(values)
    return row


class EncodedDataset(Sequence[EncodedRow]):
    """Rows with encoded memories: training reads rows (`EncodedBatches`), an index reads `entries()`.

    The vectors of a row are read when its memory is used: mapped where the files are local, otherwise the whole block.
    The checksum of a block is compared the first time it is read; the file of rows is read and compared when the
    dataset is opened. Over a slow line name a cache of fsspec: "filecache::s3://bucket/flowers".

    Args:
        address: the folder, or an address of fsspec: "s3://bucket/flowers", "hf://datasets/org/name/flowers".

    Attributes:
        manifest: the content of `encoded.json`.
        dim: width e of the memories.
        encoders: those of "pictures" and "passages", where rows have them.
        fingerprint: of the encoders, as of `RowMemories`; None where rows brought their memories.
        memory_kinds: the kinds of contents: "pictures", "passages", and "memories" that rows came with.
        left_out: rows that could not be used, and why.

    Raises:
        AdapterFileError: no dataset is there, or files are missing, changed or of another size.
        ConditionError: the dataset is still being encoded.
        ConfigError: an address of a kind that fsspec does not know.
        MissingExtraError: pyarrow is not installed.
    """

    left_out: Sequence[str]
    encoders: dict[Kind, EncoderInfo]
    memory_kinds: set[str]

    def __init__(self, address: str | os.PathLike[str]) -> None:
        pa = import_extra("pyarrow", "train")
        self.address, self.folder = os.fspath(address), FileFolder(address)
        self.manifest = _open_manifest(self.folder)
        sources, shards = self.manifest.sources, self.manifest.shards
        tables = [
            read_rows_file(self.folder, rows_name(number), rows_schema(), one.sha256)
            for number, one in enumerate(sources)
        ]
        for number, (one, table) in enumerate(zip(sources, tables, strict=True)):
            if len(table) != one.rows:
                raise AdapterFileError(
                    f"{self.folder.path(rows_name(number))!r} has {len(table)} rows, and {MANIFEST} says {one.rows}"
                )
        self._table = pa.concat_tables(tables)
        self._contents = lists_of(self._table["contents"])
        if (
            len(self._contents[1])
            and not 0 <= self._contents[1].min() <= self._contents[1].max() < self.manifest.contents
        ):
            raise AdapterFileError(
                f"rows of {self.address!r} name contents up to {self._contents[1].max()}, and {MANIFEST} has "
                f"{self.manifest.contents}"
            )
        self._numbers: Array | None = None
        self._blocks = [(shard, place) for shard, one in enumerate(shards) for place in one.blocks]
        self._ends = list(itertools.accumulate(place.contents for _, place in self._blocks))
        self._checked: set[int] = set()
        self._mapped = lru_cache(None)(self.folder.mapped)
        self._block = lru_cache(_RECENT)(self._read_recent)
        self.left_out = [line for one in sources for line in one.left_out]
        self.dim, self.encoders = self.manifest.dim, self.manifest.encoders
        self.fingerprint = self.manifest.fingerprint
        self.memory_kinds = {*self.encoders, *(["memories"] if self.manifest.saved_memories else [])}

    @property
    def sha256(self) -> str:
        """A sha256 that differs between datasets, and between selections of one."""
        digest = hashlib.sha256(self.manifest.model_dump_json().encode())
        if self._numbers is not None:
            digest.update(self._numbers.tobytes())
        return digest.hexdigest()

    @property
    def row_bytes(self) -> float:
        """Bytes of a row on the disk, on average."""
        size = sum(shard.size for shard in self.manifest.shards) + sum(one.size for one in self.manifest.sources)
        return size / max(1, len(self._table))

    @property
    def summary(self) -> str:
        """One line that describes the dataset."""
        named = [f"{kind} by {one.name or one.fingerprint[:12]}" for kind, one in self.encoders.items()]
        saved = ["saved memories"] if self.manifest.saved_memories else []
        return f"{len(self)} encoded rows ({', '.join([*named, *saved, self.manifest.dtype])})"

    def __len__(self) -> int:
        return len(self._table) if self._numbers is None else len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> EncodedRow: ...

    @overload
    def __getitem__(self, number: slice) -> EncodedDataset: ...

    def __getitem__(self, number: int | slice) -> EncodedRow | EncodedDataset:
        if isinstance(number, slice):
            return self.select(range(len(self))[number])
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of an encoded dataset with {len(self)} rows")
        number = range(len(self))[number]
        (row,) = self._rows([number if self._numbers is None else int(self._numbers[number])], self._content)
        return row

    def __iter__(self) -> Iterator[EncodedRow]:
        for start in range(0, len(self), 1024):
            numbers = range(start, min(start + 1024, len(self)))
            yield from self._rows(numbers if self._numbers is None else self._numbers[numbers], self._content)

    def select(self, numbers: Sequence[int]) -> EncodedDataset:
        """Return a dataset of the rows of these numbers, which shares the files of this one."""
        import numpy as np

        chosen = np.asarray(numbers, dtype=np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"rows {chosen.min()} to {chosen.max()} of an encoded dataset with {len(self)} rows")
        selected = copy.copy(self)
        selected._numbers = chosen if self._numbers is None else self._numbers[chosen]
        return selected

    def text_lengths(self) -> list[int]:
        """Return `Row.text_length` of every row; no vectors are read."""
        compute = import_extra("pyarrow.compute", "train")
        lengths = [compute.utf8_length(self._table[name]).to_numpy() for name in ("text", "prompt")]
        both = lengths[0] + lengths[1]
        return [int(one) for one in (both if self._numbers is None else both[self._numbers])]

    def of(self, rows: Sequence[Row]) -> Memory | None:
        """Return the memory (b, m, e) float32 of b rows, empty in a row without one; None if no row has any.

        Raises:
            ConfigError: a row with pictures or passages that are not encoded.
        """
        if any(row.images or row.passages for row in rows):
            raise ConfigError("a row has pictures or passages, and an encoded dataset has no encoder for them")
        if not any(row.has_memory for row in rows):
            return None
        empty = Memory(torch.zeros(1, 0, self.dim), segments=torch.zeros(1, 0, dtype=torch.long))
        return Memory.stack([given_memory(row.memory) if row.has_memory else empty for row in rows])

    def entries(self, size: int = 4096) -> Iterator[tuple[list[str], list[str], list[dict[str, object]], torch.Tensor]]:
        """Iterate over ids, texts, metadata and vectors (n, e) float32 of up to `size` rows at a time, for an index.

        A row without an id has its number for one.

        Raises:
            ConditionError: a row of more or less than one vector.
            AdapterFileError: a block was changed after it was written.
        """
        for start in range(0, len(self), size):
            rows = list(self[start : start + size])
            vectors = [one.unpacked() for row in rows for one in row.vectors()]
            if len(vectors) != len(rows) or any(len(one) != 1 for one in vectors):
                raise ConditionError(
                    f"rows {start} to {start + len(rows) - 1} have {sum(map(len, vectors))} vectors, and an entry of "
                    "an index has one: encode with a pooling encoder"
                )
            ids = [str(start + number) if row.id is None else row.id for number, row in enumerate(rows)]
            yield (
                ids,
                [row.text for row in rows],
                [dict(row.metadata or {}) for row in rows],
                torch.cat(vectors).float(),
            )

    def numbers_by_key(self) -> dict[bytes, int]:
        """Return the number of each content by its key."""
        _, keys = lists_of(self._table["keys"])
        return dict(zip(keys, self._contents[1].tolist(), strict=True))

    # Blocks -----------------------------------------------------------------------------------------------------------

    def block_rows(self) -> list[Array]:
        """Return the numbers of the rows that are read with each block: those whose first content lies in it.

        Rows without contents are read with the row before.
        """
        import numpy as np

        starts, contents = self._contents
        first = np.zeros(len(starts) - 1, dtype=np.int64)
        having = starts[1:] > starts[:-1]
        first[having] = contents[starts[:-1][having]]
        numbers = np.arange(len(first)) if self._numbers is None else self._numbers
        before = np.maximum.accumulate(np.where(having, np.arange(len(first)), 0))
        blocks = np.searchsorted(self._ends, first[before][numbers], side="right")
        order = np.argsort(blocks, kind="stable")
        cuts = np.searchsorted(blocks[order], np.arange(1, max(1, len(self._ends))))
        return np.split(numbers[order], cuts)

    def read_rows(self, block: int, numbers: Numbers) -> list[EncodedRow]:
        """Read rows, of which most contents lie in one block, at once; safe in several threads."""
        if not self._ends:
            return self._rows(numbers, self._content)
        vectors = self.read_block(block)
        first = self._ends[block] - self._blocks[block][1].contents
        inside = range(first, self._ends[block])
        # Contents that other rows brought are read now, too: nothing is read when a memory is asked for.
        needed = {number for row in numbers for number in self._contents_of(row)}
        others = {number: self._content(number) for number in sorted(needed.difference(inside))}
        return self._rows(numbers, lambda number: vectors[number - first] if number in inside else others[number])

    def read_block(self, number: int) -> Block:
        """Read all vectors of a block into memory; safe in several threads."""
        shard, place = self._blocks[number]
        return self._parsed(number, self.folder.read(shard_name(shard), place.start, place.end))

    def _read_recent(self, number: int) -> Block:
        if not self.folder.is_local:
            return self.read_block(number)
        shard, place = self._blocks[number]
        return self._parsed(number, self._mapped(shard_name(shard))[place.start : place.end])

    def _parsed(self, number: int, raw: torch.Tensor) -> Block:
        shard, place = self._blocks[number]
        path = self.folder.path(shard_name(shard))
        check = number not in self._checked
        if check and hashlib.sha256(raw.numpy().data).hexdigest() != place.sha256:
            raise AdapterFileError(
                f"block {number} in {path!r} was changed after it was written (wrong checksum), or is of another "
                "dataset: fetch the file again"
            )
        with making_sense(path, f"block {number}"):
            block = parse_block(raw, place, self.dim, self.manifest.dtype, check)
        self._checked.add(number)
        return block

    def _content(self, number: int) -> Vectors:
        block = bisect.bisect_right(self._ends, number)
        return self._block(block)[number - (self._ends[block] - self._blocks[block][1].contents)]

    def _contents_of(self, row: int) -> list[int]:
        starts, contents = self._contents
        return contents[starts[row] : starts[row + 1]].tolist()

    def _rows(self, numbers: Numbers, read: Read) -> list[EncodedRow]:
        """Return rows of the table, whatever is selected."""
        import numpy as np

        chosen = np.asarray(numbers, dtype=np.int64)
        table = self._table.select(["text", "prompt", "files", "id", "metadata"]).take(chosen)
        columns = {name: table[name].to_numpy().tolist() for name in ("text", "prompt", "id", "metadata")}
        files = table["files"].to_pylist() if len(lists_of(table["files"])[1]) else [()] * len(chosen)
        rows = []
        for number, paths, text, prompt, name, metadata in zip(chosen.tolist(), files, *columns.values(), strict=True):
            about = None if metadata is None else parse_json("metadata", metadata.encode(), _MAX_JSON)
            contents, names = tuple(self._contents_of(number)), tuple(map(os.fsdecode, paths))
            rows.append(EncodedRow.of(read, contents, names, text=text, prompt=prompt, id=name, metadata=about))
        return rows

    def __reduce__(self) -> tuple[object, ...]:
        return _opened, (self.address, self._numbers)

    def __repr__(self) -> str:
        return (
            f"EncodedDataset(rows={len(self)}, e={self.dim}, {self.manifest.dtype}, shards={len(self.manifest.shards)})"
        )


def is_encoded(path: str | os.PathLike[str]) -> bool:
    """Return True for the folder of an encoded dataset, finished or not, and for every address."""
    return is_address(path) or any(os.path.isfile(os.path.join(path, name)) for name in (MANIFEST, PLAN))


def _opened(address: str, numbers: Sequence[int] | None) -> EncodedDataset:
    dataset = EncodedDataset(address)
    return dataset if numbers is None else dataset.select(numbers)


def _open_manifest(folder: FileFolder) -> Manifest:
    """Return the manifest of a dataset of which all files are there."""
    manifest = read_description(folder, MANIFEST, Manifest)
    if manifest is None:
        if folder.is_local and os.path.isfile(folder.path(PLAN)):
            raise ConditionError(
                f"{folder.address!r} is not complete yet: wait, or start the same command again, which goes on"
            )
        raise AdapterFileError(f"{folder.address!r} has no {MANIFEST}: it is no encoded dataset; see `mmattn encode`")
    sizes = {shard_name(number): one.size for number, one in enumerate(manifest.shards)}
    sizes |= {rows_name(number): one.size for number, one in enumerate(manifest.sources)}
    for name, size in sizes.items():
        if folder.sizes.get(name) != size:
            wrong = "is missing" if name not in folder.sizes else f"has {folder.sizes[name]:,} bytes"
            raise AdapterFileError(
                f"{folder.path(name)!r} {wrong}, and {MANIFEST} says {size:,} bytes: fetch the file again"
            )
    return manifest
