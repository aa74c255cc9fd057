"""What describes a store as files: `store.json` of one that is whole, `plan.json` while one is made.

store.json                     what is in the store; written when all shards are there
shard-000007.safetensors       rows and their vectors
plan.json, contents/           of an encoding that is under way
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, model_validator

from mmattn.data.file_folders import FileFolder
from mmattn.data.row_contents import encoders_fingerprint
from mmattn.storage.files import write_text
from mmattn.storage.json_files import dump_json, parse_json, validated

MANIFEST, PLAN = "store.json", "plan.json"
MAX_JSON = 256 << 20

Kind = Literal["pictures", "passages"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Dtype = Literal["float16", "bfloat16", "int8"]
Described = TypeVar("Described", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StoredEncoder(_Strict):
    """What encoded the vectors.

    Args:
        fingerprint: of the encoder.
        name: under which it was loaded; None where it was not said.
        pooled: of pictures, whether each is one slot.
        pooling: of passages, as in `TextEncoder`.
        grid: of pictures, rows and columns of the slots.
    """

    fingerprint: str
    name: str | None = None
    pooled: bool = False
    pooling: str | None = None
    grid: tuple[int, int] | None = None

    @classmethod
    def of(cls, encoder: Any, name: str | None = None) -> StoredEncoder:
        """The description of an encoder.

        Args:
            encoder: of pictures or passages.
            name: under which it was loaded.
        """
        known = {key: getattr(encoder, key, None) for key in ("pooled", "pooling", "grid")}
        return cls(fingerprint=encoder.fingerprint, name=name, **{k: v for k, v in known.items() if v is not None})


class StoredSource(_Strict):
    """Where rows came from.

    Args:
        name: as it was given.
        fingerprint: of its rows.
        rows: those it has, the ones left out too.
        shards: how many hold them.
        left_out: what could not be used, and why.
    """

    name: str
    fingerprint: str
    rows: int = Field(ge=0)
    shards: int = Field(ge=0)
    left_out: list[str]


class StoredShard(_Strict):
    """A shard.

    Args:
        blocks: rows, entries and slots of each block.
        size: bytes of the file.
        sha256: of the file's header, which has the checksums of all it holds.
    """

    blocks: list[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]]
    size: NonNegativeInt
    sha256: str

    @property
    def rows(self) -> int:
        """Rows that it holds."""
        return sum(block[0] for block in self.blocks)


class ShardHeader(_Strict):
    """What the header of a shard's file says besides its tensors.

    Args:
        format: of the file.
        blocks: as in `StoredShard`.
        squares: as in `Manifest`.
        plan: sha256 of the plan that it is of.
        kinds: of the parts of its rows.
        rows: those of the source that it stands for, the ones left out too.
        left_out: what could not be used, and why.
    """

    format: str
    blocks: list[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]]
    squares: tuple[NonNegativeFloat, NonNegativeFloat]
    plan: str
    kinds: list[Literal["pictures", "passages", "memories"]]
    rows: NonNegativeInt
    left_out: list[str]


class _Encoded(_Strict):
    """What all shards of a store have in common."""

    dim: int = Field(ge=1, le=1 << 24)
    dtype: Dtype
    encoders: dict[Kind, StoredEncoder]


class Manifest(_Encoded):
    """What `store.json` says.

    Args:
        format: "mmattn-store".
        format_version: 1.
        dim: width e of the vectors.
        dtype: of the vectors.
        encoders: of pictures and passages, where rows have them.
        given_memories: whether rows came with memories of their own.
        sources: in the order of their shards.
        shards: in order.
        squares: sum of the squares of what storing lost, and of the vectors.
    """

    format: Literal["mmattn-store"] = "mmattn-store"
    format_version: Literal[1] = 1
    given_memories: bool
    sources: list[StoredSource]
    shards: list[StoredShard]
    squares: tuple[NonNegativeFloat, NonNegativeFloat]

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        if sum(source.shards for source in self.sources) != len(self.shards):
            raise ValueError(
                f"its sources have {[one.shards for one in self.sources]} shards, listed: {len(self.shards)}"
            )
        shards = iter(self.shards)
        for source in self.sources:
            rows = sum(shard.rows for shard in itertools.islice(shards, source.shards))
            if not source.rows - len(source.left_out) <= rows <= source.rows:
                raise ValueError(
                    f"{source.name} had {source.rows} rows, {len(source.left_out)} left out, and its shards have {rows}"
                )
        return self

    @property
    def relative_error(self) -> float:
        """The norm of what storing lost, for each unit of the norm of the vectors."""
        lost, whole = self.squares
        return (lost / whole) ** 0.5 if whole else 0.0

    @property
    def fingerprint(self) -> str | None:
        """What identifies the encoders; None where there are none."""
        ordered = [self.encoders[kind] for kind in KINDS if kind in self.encoders]
        return encoders_fingerprint([one.fingerprint for one in ordered])


class Plan(_Encoded):
    """What `plan.json` says: which rows become which shards.

    Args:
        format: "mmattn-store-plan".
        format_version: 1.
        dim: as in `Manifest`.
        dtype: as in `Manifest`.
        encoders: as in `Manifest`.
        source: name of the source.
        fingerprint: of its rows.
        rows: of the source; None of a stream, whose end is not known.
        first_shard: number of the first shard of this source.
        rows_per_shard: rows of the source in each shard, those left out too.
        block_bytes: of a block, about.
    """

    format: Literal["mmattn-store-plan"] = "mmattn-store-plan"
    format_version: Literal[1] = 1
    source: str
    fingerprint: str
    rows: int | None
    first_shard: int = Field(ge=0)
    rows_per_shard: int = Field(ge=1)
    block_bytes: int = Field(ge=1)

    @property
    def sha256(self) -> str:
        """What ties shards to this plan."""
        return hashlib.sha256(_dumped(self)).hexdigest()

    @property
    def shards(self) -> range:
        """The numbers of its shards; of a stream none are known."""
        return range(self.first_shard, self.first_shard + -(-(self.rows or 0) // self.rows_per_shard))

    def rows_of(self, shard: int) -> range:
        """The rows of the source that a shard holds.

        Args:
            shard: its number.
        """
        start = (shard - self.first_shard) * self.rows_per_shard
        end = start + self.rows_per_shard
        return range(start, end if self.rows is None else min(end, self.rows))


def write_description(path: Path, described: BaseModel) -> None:
    """Write a manifest or a plan, atomically.

    Args:
        path: of the file.
        described: what it says.

    Raises:
        OSError: the disk is full, or the folder is not writable.
    """
    write_text(path, _dumped(described).decode() + "\n")


def read_description(folder: FileFolder, name: str, kind: type[Described]) -> Described | None:
    """Read a manifest or a plan, checked; None where there is no such file.

    Args:
        folder: of the store.
        name: of the file.
        kind: `Manifest` or `Plan`.

    Raises:
        AdapterFileError: it is damaged, of a later version or something else.
    """
    if name not in folder.sizes:
        return None
    path = folder.path(name)
    raw = folder.read(name, 0, folder.sizes[name]).numpy().tobytes()
    parse_json(repr(path), raw, MAX_JSON)
    described: Described = validated(f"{path!r}, which describes a store,", kind, raw.removeprefix(codecs.BOM_UTF8))
    return described


def _dumped(described: BaseModel) -> bytes:
    return dump_json("the description of a store", described.model_dump(mode="json"), MAX_JSON)
