"""The shards of an embedded corpus, as files: what describes them, and reading them.

plan.json              what is embedded with what, and which lines make which shard; written first
shard-000007.parquet   id, text, metadata (JSON) and vector of the rows of one stretch of lines
manifest.json          rows and sha256 of each shard; written when all shards are there
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConditionError, import_extra
from mmattn.storage.files import write_text
from mmattn.storage.fingerprints import file_fingerprint
from mmattn.storage.json_files import dump_json, making_sense, parse_json, read_json, validated
from mmattn.storage.safetensors import check_values

FORMAT = "mmattn-corpus"
MAX_JSON = 256 << 20

PLAN, MANIFEST = "plan.json", "manifest.json"


class CorpusShards:
    """The shards of an embedded corpus: iterating gives (ids, texts, metadata, vectors) of one shard after the other.

    Args:
        folder: where `embed_corpus` wrote.

    Attributes:
        encoder: fingerprint of the encoder.
        dim: width e of the vectors.
        complete: whether all shards were there when this was opened.

    Raises:
        AdapterFileError: no such folder, or one that `embed_corpus` did not write.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._plan = read_plan(self.folder / PLAN)
        self.encoder: str = self._plan["encoder"]
        self.dim: int = self._plan["dim"]
        self.complete = (self.folder / MANIFEST).is_file()
        self._shards = read_shards(self.folder / MANIFEST, len(self._plan["stretches"])) if self.complete else []

    def __len__(self) -> int:
        """The rows of all shards.

        Raises:
            ConditionError: shards are missing.
        """
        self._check_complete()
        return sum(shard["rows"] for shard in self._shards)

    def __iter__(self) -> Iterator[tuple[list[str], list[str], list[dict[str, Any]], Tensor]]:
        """Ids, texts, metadata and vectors (n, e) of each shard, in the order of the lines.

        Raises:
            ConditionError: shards are missing.
            AdapterFileError: a shard was changed since it was written.
        """
        self._check_complete()
        parquet = import_extra("pyarrow.parquet", "scale")
        for number, shard in enumerate(self._shards):
            path = self.folder / shard_name(number)
            if not path.is_file() or file_fingerprint(path) != shard["sha256"]:
                raise AdapterFileError(
                    f"{str(path)!r} is missing or was changed after it was written (wrong checksum); delete it and run "
                    "embed_corpus again, which makes what is missing"
                )
            with making_sense(path, f"shard of width {self.dim}"):
                table = parquet.read_table(path)
                flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                vectors = torch.from_numpy(flat.copy()).view(shard["rows"], self.dim)
                check_values("vector", vectors)
                if vectors.dtype != torch.float32:
                    raise AdapterFileError(f"{str(path)!r} has vectors in {vectors.dtype}, and float32 was written")
                ids, texts = (validated(name, list[str], table[name].to_pylist()) for name in ("id", "text"))
                said = [parse_json("metadata", text.encode(), MAX_JSON) for text in table["metadata"].to_pylist()]
                row = ids, texts, validated("metadata", list[dict[str, Any]], said), vectors
            yield row

    def __repr__(self) -> str:
        rows = f"rows={len(self)}" if self.complete else "incomplete"
        return f"CorpusShards({rows}, e={self.dim}, shards={len(self._plan['stretches'])})"

    def _check_complete(self) -> None:
        if not self.complete:
            raise ConditionError(
                f"not all of the {len(self._plan['stretches'])} shards of {str(self.folder)!r} are there: wait for the "
                "other workers and open it again, or run embed_corpus once more, which makes what is missing"
            )


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:06d}.parquet"


def dump_plan(value: dict[str, Any]) -> bytes:
    """A description as JSON."""
    return dump_json("the plan of a corpus", value, MAX_JSON)


def write_description(path: Path, value: dict[str, Any]) -> None:
    """Write a description, atomically."""
    write_text(path, dump_plan(value).decode() + "\n")


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path, MAX_JSON)
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("format_version") != 1:
        raise AdapterFileError(f"{str(path)!r} is not of an embedded corpus of this version")
    return found


def read_plan(path: Path) -> dict[str, Any]:
    """What a plan says, checked.

    Raises:
        AdapterFileError: it is something else.
    """
    plan = _read(path)
    settings, files, stretches = plan.get("settings"), plan.get("files"), plan.get("stretches")
    sound = (
        isinstance(plan.get("encoder"), str)
        and type(plan.get("dim")) is int
        and plan["dim"] >= 0
        and isinstance(settings, dict)
        and set(settings) == {"field", "id_field", "lines_per_shard"}
        and isinstance(files, dict)
        and all(isinstance(hashed, str) for hashed in files.values())
        and isinstance(stretches, list)
    )
    if not sound:
        raise AdapterFileError(f"{str(path)!r} was changed after it was written: it does not say what is embedded")
    return plan


def read_shards(path: Path, count: int) -> list[dict[str, Any]]:
    """Rows and sha256 of each of `count` shards, as a manifest says, checked.

    Raises:
        AdapterFileError: it is something else.
    """
    shards: Any = _read(path).get("shards")
    sound = (
        isinstance(shards, list)
        and len(shards) == count
        and all(
            isinstance(shard, dict)
            and set(shard) == {"rows", "sha256"}
            and type(shard["rows"]) is int
            and shard["rows"] >= 0
            and isinstance(shard["sha256"], str)
            for shard in shards
        )
    )
    if not sound:
        raise AdapterFileError(f"{str(path)!r} was changed after it was written: it does not describe {count} shards")
    return list(shards)
