"""Files of an encoded dataset: Arrow streams, which `datasets.Dataset.from_file` opens, too, and their description.

encoded.json           encoders, sources and shards, with a checksum for each block; written last
rows-000.arrow         the rows of a source: texts, and the numbers of the contents that make each memory
vectors-000007.arrow   the vectors of contents, in blocks of about 16 MB that are read and checked one by one
encoding/              a job under way: its plan, its rows, and a report for each shard that is done

A content is a picture, a passage or a saved memory; it is encoded and stored once, however many rows have it.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from mmattn.core.quantization import quantize
from mmattn.data.row import RowEncoder, encoders_fingerprint
from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.memory import Memory
from mmattn.storage.files import FileFolder, replacing, write_text
from mmattn.storage.fingerprints import file_fingerprint
from mmattn.storage.json_files import dump_json, making_sense, parse_json, validated
from mmattn.storage.safetensors import check_values

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

MANIFEST, WORK = "encoded.json", "encoding"
PLAN = f"{WORK}/plan.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
_ARROW = {"float16": "float16", "bfloat16": "int16", "float32": "float32", "int8": "int8"}
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MAX_JSON = 256 << 20

Array: TypeAlias = "np.ndarray[Any, Any]"
Dtype = Literal["float16", "bfloat16", "float32", "int8"]
Kind = Literal["pictures", "passages"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Description = TypeVar("Description", bound=BaseModel)


class Strict(BaseModel):
    """A description that has no other fields than it declares."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EncoderInfo(Strict):
    """The encoder of all pictures or all passages."""

    fingerprint: str
    name: str | None = None
    pooled: bool = False
    pooling: str | None = None
    grid: tuple[int, int] | None = None

    @classmethod
    def of(cls, encoder: RowEncoder, name: str | None = None) -> EncoderInfo:
        """Describe an encoder that was loaded under a name."""
        settings = {key: getattr(encoder, key, None) for key in ("pooled", "pooling", "grid")}
        return cls(fingerprint=encoder.fingerprint, name=name, **{k: v for k, v in settings.items() if v is not None})


class RowsFile(Strict):
    """The rows of one source; `total` counts those left out, too."""

    name: str
    fingerprint: str
    rows: NonNegativeInt
    total: NonNegativeInt
    left_out: list[str]
    size: NonNegativeInt
    sha256: str


class BlockInfo(Strict):
    """Some contents, side by side in a shard: bytes start to end of the file."""

    contents: NonNegativeInt
    slots: NonNegativeInt
    start: NonNegativeInt
    end: NonNegativeInt
    sha256: str


class VectorShard(Strict):
    """A file of vectors; `squares` are those of what storing lost, and of the vectors."""

    size: NonNegativeInt
    blocks: list[BlockInfo]
    squares: tuple[NonNegativeFloat, NonNegativeFloat]

    @property
    def contents(self) -> int:
        """Number of contents."""
        return sum(block.contents for block in self.blocks)


class Encoding(Strict):
    """Settings that all shards of a dataset share."""

    dim: int = Field(ge=1, le=1 << 24)
    dtype: Dtype
    encoders: dict[Kind, EncoderInfo]
    saved_memories: bool


class Manifest(Encoding):
    """The content of `encoded.json`."""

    format: Literal["mmattn-encoded"] = "mmattn-encoded"
    format_version: Literal[1] = 1
    sources: list[RowsFile] = Field(min_length=1)
    shards: list[VectorShard]

    @property
    def contents(self) -> int:
        """Number of contents."""
        return sum(shard.contents for shard in self.shards)

    @property
    def relative_error(self) -> float:
        """The norm of what storing in `dtype` lost, divided by the norm of the vectors."""
        lost, whole = (sum(shard.squares[i] for shard in self.shards) for i in (0, 1))
        return float(lost / whole) ** 0.5 if whole else 0.0

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the encoders; None where there are none."""
        return encoders_fingerprint([self.encoders[kind].fingerprint for kind in KINDS if kind in self.encoders])


def rows_name(source: int) -> str:
    """Return the name of the file of a source's rows."""
    return f"rows-{source:03d}.arrow"


def shard_name(shard: int) -> str:
    """Return the name of the file of a shard."""
    return f"vectors-{shard:06d}.arrow"


def write_description(path: Path, description: BaseModel) -> None:
    """Write a description as JSON, atomically."""
    raw = dump_json("the description of an encoded dataset", description.model_dump(mode="json"), _MAX_JSON)
    write_text(path, raw.decode() + "\n")


def read_description(folder: FileFolder, name: str, kind: type[Description]) -> Description | None:
    """Read what `write_description` wrote, or return None where there is no such file."""
    if name not in folder.sizes:
        return None
    path, raw = folder.path(name), folder.read(name).numpy().tobytes()
    parse_json(repr(path), raw, _MAX_JSON)
    return validated(f"{path!r}", kind, raw.removeprefix(codecs.BOM_UTF8))


# Rows -----------------------------------------------------------------------------------------------------------------


def rows_schema(with_numbers: bool = False) -> pa.Schema:
    """Return the Arrow schema of rows; of a job they have their numbers in the source, too."""
    pa = import_extra("pyarrow", "train")
    columns = {
        "text": pa.large_string(),
        "prompt": pa.large_string(),
        "contents": pa.large_list(pa.int64()),
        "keys": pa.large_list(pa.binary(32)),
        "files": pa.large_list(pa.large_binary()),  # names of files may hold bytes that are no UTF-8
        "id": pa.large_string(),
        "metadata": pa.large_string(),
    }
    fields = [pa.field(name, kind, nullable=name in ("id", "metadata")) for name, kind in columns.items()]
    return pa.schema([*fields, pa.field("number", pa.int64())] if with_numbers else fields)


def write_rows(path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> tuple[int, str]:
    """Write record batches to a file, atomically; return its size and sha256."""
    pa = import_extra("pyarrow", "train")
    with replacing(path) as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path.stat().st_size, file_fingerprint(path)


def read_rows_file(folder: FileFolder, name: str, schema: pa.Schema, sha256: str | None = None) -> pa.Table:
    """Read a file of rows as a `pyarrow.Table`, mapped where it is local."""
    pa = import_extra("pyarrow", "train")
    path = folder.path(name)
    raw = folder.mapped(name) if folder.is_local else folder.read(name)
    if sha256 is not None and hashlib.sha256(raw.numpy().data).hexdigest() != sha256:
        raise AdapterFileError(f"{path!r} was changed after it was written (wrong checksum): fetch the file again")
    with making_sense(path, "rows"):
        table = pa.ipc.open_stream(pa.py_buffer(raw.numpy())).read_all()
        if table.schema != schema:
            raise AdapterFileError(f"{path!r} has the columns {table.schema.names}, and rows have {schema.names}")
        table.validate(full=True)
    return table


def lists_of(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """Return where each list of a column begins, and the values of all."""
    import numpy as np

    lists = [chunk for chunk in column.chunks if len(chunk)]
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in lists]
    lengths = [chunk.value_lengths().to_numpy() for chunk in lists]
    starts = np.concatenate([[0], *lengths]).cumsum()
    return starts, np.concatenate([np.empty(0, dtype=np.int64), *values]) if values else np.empty(0, dtype=np.int64)


# Vectors --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vectors:
    """The vectors (m, e) of one content, with scales (m,) of int8, segments (m,) and scores (m,) or None."""

    tokens: Tensor
    scales: Tensor | None = None
    segments: Tensor | None = None
    scores: Tensor | None = None

    def unpacked(self) -> Tensor:
        """Return the vectors (m, e): of int8 in float32, otherwise as they are stored."""
        return self.tokens if self.scales is None else self.tokens.float() * self.scales[:, None]

    def copied(self) -> Vectors:
        """Return copies that do not share the block's bytes."""
        parts = (self.tokens, self.scales, self.segments, self.scores)
        return Vectors(*(None if part is None else part.clone() for part in parts))  # type: ignore[arg-type]

    def memory(self) -> Memory:
        """Return a memory (1, m, e) of this content alone."""
        tokens = self.unpacked()
        segments = torch.zeros(len(tokens), dtype=torch.long) if self.segments is None else self.segments.long()
        memory = Memory(
            tokens[None], None, segments[None], None if self.scores is None else self.scores[None], check_finite=False
        )
        memory.finite_checked = True  # checked where the block was read
        return memory


@dataclass(frozen=True)
class _Ragged:
    """A column of a block: values of all contents, and where each begins."""

    values: Tensor
    starts: list[int]

    def __getitem__(self, number: int) -> Tensor | None:
        start, end = self.starts[number], self.starts[number + 1]
        return self.values[start:end] if end > start else None


@dataclass(frozen=True)
class Block:
    """The contents of a block, in memory or mapped."""

    tokens: _Ragged
    others: dict[str, _Ragged]

    def __getitem__(self, number: int) -> Vectors:
        start, end = self.tokens.starts[number], self.tokens.starts[number + 1]
        others = {name: column[number] for name, column in self.others.items()}
        return Vectors(self.tokens.values[start:end], **others)


def block_schema(dim: int, dtype: str) -> pa.Schema:
    """Return the Arrow schema of a shard: a row for each content."""
    pa = import_extra("pyarrow", "train")
    stored = getattr(pa, _ARROW[dtype])()
    columns = {"tokens": pa.list_(pa.list_(stored, dim)), "scales": pa.list_(pa.float32())}
    columns |= {"segments": pa.list_(pa.int32()), "scores": pa.list_(pa.float32())}
    return pa.schema([pa.field(name, kind) for name, kind in columns.items() if name != "scales" or dtype == "int8"])


def write_shard(path: Path, blocks: Iterable[Sequence[Vectors]], dim: int, dtype: str) -> VectorShard:
    """Write blocks of contents to a shard, atomically."""
    schema = block_schema(dim, dtype)
    places: list[BlockInfo] = []
    squares = torch.zeros(2, dtype=torch.float64)
    with replacing(path) as file:
        position = file.write(schema.serialize())
        for contents in blocks:
            batch, lost = _packed(contents, dim, dtype, schema)
            squares += lost
            message = batch.serialize()
            place = {"start": position, "end": position + message.size, "sha256": hashlib.sha256(message).hexdigest()}
            slots = sum(len(one.tokens) for one in contents)
            places.append(BlockInfo(contents=len(contents), slots=slots, **place))
            position += file.write(message)
        position += file.write(_END_OF_STREAM)
    lost, whole = squares.tolist()
    return VectorShard(size=position, blocks=places, squares=(lost, whole))


def _packed(contents: Sequence[Vectors], dim: int, dtype: str, schema: pa.Schema) -> tuple[pa.RecordBatch, Tensor]:
    """Return contents as a record batch, and the squares of what that lost and of the vectors."""
    pa = import_extra("pyarrow", "train")
    widest = max((one.tokens.shape[1] for one in contents), default=0)
    if widest > dim:
        raise ConfigError(f"a memory is {widest} wide, and the dataset has {dim}: give dim={widest}")
    padded = [torch.nn.functional.pad(one.tokens.float(), (0, dim - one.tokens.shape[1])) for one in contents]
    tokens = torch.cat([torch.empty(0, dim), *padded])
    lengths = [len(one.tokens) for one in contents]
    columns = {}
    if dtype == "int8":
        codes, scales = quantize(tokens, 1, 127)
        stored = Vectors(codes, scales[:, 0].float())
        columns["scales"] = _lists(lengths, pa.array(scales[:, 0].float().numpy()))
    else:
        stored = Vectors(tokens.to(DTYPES[dtype]))
    lost = torch.stack([(stored.unpacked().double() - tokens).square().sum(), tokens.double().square().sum()])
    if not bool(lost.isfinite().all()):
        raise ConfigError(
            f"vectors of up to {float(tokens.abs().max()):.3g} do not fit into {dtype}: encode with bfloat16, or find "
            "out why the encoder gives such values"
        )
    values = stored.tokens.view(torch.int16) if dtype == "bfloat16" else stored.tokens
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(values.numpy().reshape(-1)), dim)
    columns["tokens"] = _lists(lengths, fixed)
    for name, kind in (("segments", torch.int32), ("scores", torch.float32)):
        parts = [getattr(one, name) for one in contents]
        values = torch.cat([torch.empty(0, dtype=kind), *(one.to(kind) for one in parts if one is not None)])
        columns[name] = _lists([0 if one is None else len(one) for one in parts], pa.array(values.numpy()))
    return pa.record_batch([columns[name] for name in schema.names], schema=schema), lost


def _lists(lengths: Sequence[int], values: pa.Array) -> pa.ListArray:
    pa = import_extra("pyarrow", "train")
    return pa.ListArray.from_arrays(pa.array([0, *itertools.accumulate(lengths)], pa.int32()), values)


def parse_block(raw: Tensor, info: BlockInfo, dim: int, dtype: str, check: bool = True) -> Block:
    """Return the contents of a block from its bytes (n,) uint8, which the tensors share."""
    pa = import_extra("pyarrow", "train")
    batch = pa.ipc.read_record_batch(pa.py_buffer(raw.numpy()), block_schema(dim, dtype))
    if check:
        batch.validate(full=True)

    def tensor(values: Any, kind: torch.dtype) -> Tensor:
        if not len(values):
            return torch.empty(0, dtype=kind)
        buffer = values.buffers()[1]
        start = buffer.address - raw.data_ptr()
        return raw[start : start + len(values) * kind.itemsize].view(kind)

    def column(name: str, kind: torch.dtype) -> _Ragged:
        lists = batch.column(name)
        values = lists.values.values if name == "tokens" else lists.values
        if lists.null_count or values.null_count:
            raise AdapterFileError(f"{name} has missing values")
        flat = tensor(values, kind)
        if check:
            check_values(name, flat)
        return _Ragged(flat, lists.offsets.to_numpy().tolist())

    tokens = column("tokens", DTYPES[dtype])
    tokens = _Ragged(tokens.values.view(-1, dim), tokens.starts)
    if (len(batch), tokens.starts[-1]) != (info.contents, info.slots):
        raise AdapterFileError(f"it has {len(batch)} contents, and {MANIFEST} says {info.contents}")
    others = {"segments": torch.int32, "scores": torch.float32} | ({"scales": torch.float32} if dtype == "int8" else {})
    columns = {name: column(name, kind) for name, kind in others.items()}
    lengths = _lengths(tokens)
    for name, one in columns.items():
        if one.starts[-1] and any(have not in (0, length) for have, length in zip(_lengths(one), lengths, strict=True)):
            raise AdapterFileError(f"a content has another number of {name} than of slots")
    # An absent column is left out, so that reading a content does not look into it.
    return Block(tokens, {name: one for name, one in columns.items() if one.starts[-1]})


def _lengths(column: _Ragged) -> list[int]:
    return [end - start for start, end in itertools.pairwise(column.starts)]
