"""A shard: one tensor file of many blocks, written at once and read block by block."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.adapter_config import check_tensors
from mmattn.core.quantization import quantize
from mmattn.data.encoded.blocks import Columns, Entry, Part
from mmattn.data.encoded.manifest import ShardHeader, StoredShard
from mmattn.data.file_folders import FileFolder
from mmattn.data.open_tensors import TensorFile
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.json_files import making_sense, validated
from mmattn.storage.safetensors import write_tensors

FORMAT = "mmattn-store-shard"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
BLOCK_BYTES = 16 << 20
"""Vectors and texts of a block, about: large enough for the disk, small enough that many are in memory at once."""

_OPTIONAL = {"segments": torch.int32, "scores": torch.float32}
_VECTORS = ("tokens", "scales", *_OPTIONAL)


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:06d}.safetensors"


@dataclass
class _OpenBlock:
    """The block that rows are added to."""

    texts: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    parts: list[tuple[Part, ...]] = field(default_factory=list)
    sources: list[Sequence[str]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    size: int = 0


class ShardWriter:
    """Gathers the rows and entries of a shard, in order, and writes its file.

    Args:
        number: of the shard.
        dim: width e of the vectors.
        dtype: in which they are stored: "float16", "bfloat16" or "int8".
        block_bytes: of a block, about.
    """

    def __init__(self, number: int, dim: int, dtype: str, block_bytes: int = BLOCK_BYTES) -> None:
        self.number, self.dim, self.dtype, self.block_bytes = number, dim, dtype, block_bytes
        self._keys: list[bytes] = []
        self._tensors: dict[str, Tensor] = {}
        self._blocks: list[list[int]] = []
        self._squares = torch.zeros(2, dtype=torch.float64)
        self._first, self._open = 0, _OpenBlock()

    def add_entry(self, key: bytes, entry: Entry | None) -> None:
        """Add the next entry.

        Args:
            key: the sha256 of its content.
            entry: with vectors in floating point, at most as wide as the store; None for a picture that cannot be read,
                which no row refers to.

        Raises:
            ConfigError: vectors that are wider.
        """
        entry = Entry(torch.empty(0, self.dim)) if entry is None else entry
        if entry.tokens.shape[1] > self.dim:
            width = entry.tokens.shape[1]
            raise ConfigError(f"a memory is {width} wide, and the store has {self.dim}: give dim={width}")
        self._keys.append(key)
        self._open.entries.append(entry)
        self._open.size += entry.tokens.shape[0] * self.dim * DTYPES[self.dtype].itemsize

    def add_row(self, text: str, prompt: str, parts: Sequence[Part], sources: Sequence[str] = ()) -> None:
        """Add a row, whose own entries were added before.

        Args:
            text: of the row.
            prompt: of the row.
            parts: the entries of its memory.
            sources: the files of its pictures.

        Raises:
            ConfigError: vectors that do not fit into the dtype.
        """
        block = self._open
        block.texts.append(text)
        block.prompts.append(prompt)
        block.parts.append(tuple(parts))
        block.sources.append(sources)
        block.size += len(text) + len(prompt)
        if block.size >= self.block_bytes:
            self._close()

    def write(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Write the file, atomically.

        Args:
            folder: of the store.
            metadata: what its header says besides.

        Raises:
            ConfigError: vectors that do not fit into the dtype.
            OSError: the disk is full, or the folder is not writable.
        """
        if self._open.texts or self._open.entries:
            self._close()
        keys = as_bytes(b"".join(self._keys)).view(-1, 32)
        about = {"format": FORMAT, "blocks": self._blocks, "squares": self._squares.tolist(), **metadata}
        write_tensors(folder / shard_name(self.number), {**self._tensors, "keys": keys}, about)

    def _close(self) -> None:
        block, entries, lengths = self._open, self._open.entries, [len(entry.tokens) for entry in self._open.entries]
        tensors = self._packed([entry.tokens for entry in entries])
        for name, dtype in _OPTIONAL.items():
            given = [getattr(entry, name) for entry in entries]
            if any(values is not None for values in given):
                zeros = [torch.zeros(length) if x is None else x for x, length in zip(given, lengths, strict=True)]
                tensors[name] = torch.cat([x.to(dtype) for x in zeros])
        prompts = block.prompts if any(block.prompts) else None
        sources = block.sources if any(block.sources) else None
        scored = [self._first + number for number, entry in enumerate(entries) if entry.scores is not None] or None
        columns = Columns(block.texts, prompts, block.parts, sources, self._first, lengths, scored)
        tensors["rows"] = as_bytes(columns.dump(self.number))
        number = len(self._blocks)
        self._tensors |= {f"{number:04d}.{name}": tensor for name, tensor in tensors.items()}
        self._blocks.append([len(block.texts), len(lengths), sum(lengths)])
        self._first, self._open = self._first + len(entries), _OpenBlock()

    def _packed(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """The vectors as they are stored; what that loses is added up."""
        padded = [torch.nn.functional.pad(row.float(), (0, self.dim - row.shape[1])) for row in rows]
        tokens = torch.cat([torch.empty(0, self.dim), *padded])
        if self.dtype == "int8":
            codes, scales = quantize(tokens, 1, 127)
            packed = {"tokens": codes, "scales": scales}
        else:
            packed = {"tokens": tokens.to(DTYPES[self.dtype])}
        stored = Entry(**packed).unpacked()
        lost = torch.stack([(stored.double() - tokens).square().sum(), tokens.double().square().sum()])
        if not bool(lost.isfinite().all()):
            raise ConfigError(
                f"vectors of up to {float(tokens.abs().max()):.3g} do not fit into {self.dtype}: encode with bfloat16 "
                "or int8, or find out why the encoder gives such values"
            )
        self._squares += lost
        return packed


def open_shard(folder: FileFolder, number: int) -> TensorFile:
    """The file of a shard, of which the header is read.

    Args:
        folder: of the store.
        number: of the shard.

    Raises:
        AdapterFileError: it is missing, torn or something else.
    """
    return TensorFile(folder, shard_name(number), FORMAT)


def read_shard_header(file: TensorFile) -> ShardHeader:
    """What the header of a shard says besides its tensors, checked.

    Args:
        file: of the shard.

    Raises:
        AdapterFileError: it says something else.
    """
    header: ShardHeader = validated(f"the header of {file.name!r}", ShardHeader, json.dumps(file.metadata).encode())
    return header


def check_shard(file: TensorFile, shard: StoredShard, dim: int, dtype: str) -> None:
    """Refuse a shard whose tensors are not those of its blocks.

    Args:
        file: of the shard.
        shard: what the store says of it.
        dim: width e of the vectors.
        dtype: in which they are stored.

    Raises:
        AdapterFileError: they are not.
    """
    if read_shard_header(file).blocks != shard.blocks:
        raise AdapterFileError(f"{file.folder.path(file.name)!r} says that it has other blocks than the store says")
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "keys": ((sum(block[1] for block in shard.blocks), 32), torch.uint8)
    }
    for number, (_, _, slots) in enumerate(shard.blocks):
        expected[f"{number:04d}.tokens"] = ((slots, dim), DTYPES[dtype])
        if dtype == "int8":
            expected[f"{number:04d}.scales"] = ((slots, 1), torch.bfloat16)
        more = {f"{number:04d}.{name}": ((slots,), kind) for name, kind in _OPTIONAL.items()}
        expected |= {name: sizes for name, sizes in more.items() if name in file}
        if (rows := f"{number:04d}.rows") in file:
            expected[rows] = ((math.prod(file.tensors[rows][0]),), torch.uint8)
    check_tensors(expected, file.tensors)


def read_columns(
    file: TensorFile, shard: int, block: int, counts: tuple[int, int, int], ends: Sequence[Sequence[int]]
) -> Columns:
    """The rows of a block without their vectors.

    Args:
        file: of the shard.
        shard: its number.
        block: number of the block in it.
        counts: its rows, entries and slots, as the store says.
        ends: of every block of every shard the first entry after it, as the store says.

    Raises:
        AdapterFileError: the block was changed after it was written, or does not say what a block says.
    """
    path = file.folder.path(file.name)
    with making_sense(path, f"block {block}"):
        columns = Columns.load(file.read(f"{block:04d}.rows").numpy().tobytes(), shard)
        if columns.counts != counts or columns.first != ends[shard][block] - counts[1]:
            raise AdapterFileError(
                f"block {block} of {path!r} begins at entry {columns.first} with {columns.counts} rows, entries and "
                f"slots, and the store says {counts}"
            )
        entries = [one[-1] if one else 0 for one in ends]
        if any(not 0 <= other < len(ends) or not 0 <= n < entries[other] for row in columns.parts for other, n in row):
            raise AdapterFileError(f"block {block} of {path!r} names entries that no shard of the store has")
    return columns


def read_vectors(file: TensorFile, block: int) -> dict[str, Tensor]:
    """The tensors of all entries of a block.

    Args:
        file: of the shard.
        block: number of the block in it.

    Raises:
        AdapterFileError: the block was changed after it was written.
    """
    with making_sense(file.folder.path(file.name), f"vectors of block {block}"):
        return {name: file.read(full) for name in _VECTORS if (full := f"{block:04d}.{name}") in file}


def read_entry(file: TensorFile, block: int, columns: Columns, number: int) -> Entry:
    """One entry of a block: mapped where the file lies on this machine, otherwise read by its range.

    Args:
        file: of the shard.
        block: number of the block in it.
        columns: of the block.
        number: of the entry in the shard.

    Raises:
        AdapterFileError: the block was changed after it was written.
    """
    found = {}
    start, end = columns.span(number)
    with making_sense(file.folder.path(file.name), f"vectors of block {block}"):
        for name in _VECTORS:
            full = f"{block:04d}.{name}"
            if full in file and not columns.lacks(name, number):
                is_local = file.folder.is_local
                found[name] = file.read(full, mapped=True)[start:end] if is_local else file.read_rows(full, start, end)
    return Entry(**found)


def as_bytes(raw: bytes) -> Tensor:
    """Bytes as a tensor (n,) uint8."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
