"""What of an index goes into the files of a version, and back. See `mmattn.retrieval.folder` for the folder."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, NonFiniteError
from mmattn.retrieval.approximate import HNSW, IVFPQ, FaissEngine, Flat, described_maker, read_engine
from mmattn.retrieval.entries import Entries
from mmattn.retrieval.folder import read_version, write_version
from mmattn.retrieval.state import EngineMaker, Part, State
from mmattn.retrieval.vectors import METRICS
from mmattn.storage.atomic import Path, replacing
from mmattn.storage.tensor_files import check_values, read_header, write_tensors

VECTORS = "vectors.safetensors"
ENTRIES = "entries.jsonl"
ENGINE = "engine.faiss"
TENSOR_FORMAT = "mmattn-index-vectors"

_ABOUT = {"count", "dim", "metric", "encoder", "engine", "next_id"}


def save_index(path: Path, state: State, about: dict[str, Any], saved: dict[str, str]) -> None:
    """Save a state; `saved` says which save of each folder it follows, and is brought up to date."""
    entries = state.entries
    about = {"count": len(entries), "dim": entries.vectors.shape[1], "metric": state.metric, **about}
    engine = state.parts[0].engine if state.parts else None

    def write(folder: str) -> None:
        tensors = {"vectors": entries.vectors}
        if entries.tokens:
            tensors["tokens"] = torch.cat(entries.tokens)
            tensors["lengths"] = torch.tensor([len(part) for part in entries.tokens])
        if isinstance(engine, FaissEngine):
            tensors["rows"] = state.parts[0].rows
            with replacing(os.path.join(folder, ENGINE)) as file:
                file.write(engine.serialized())
        write_tensors(os.path.join(folder, VECTORS), tensors, {"format": TENSOR_FORMAT})
        with replacing(os.path.join(folder, ENTRIES)) as file:
            for row in zip(entries.ids, entries.texts, entries.metadata, strict=True):
                line = dict(zip(("id", "text", "metadata"), row, strict=True))
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    place = os.path.realpath(path)
    saved[place] = write_version(place, about, write, saved.get(place))


def load_index(path: Path, mapped: bool) -> tuple[dict[str, str], State, dict[str, Any], EngineMaker]:
    """Which save it is, the state, what else was saved, and what makes the engine.

    Raises:
        IndexFileError: as for `read_version`.
    """

    def read(about: dict[str, Any], folder: str) -> tuple[State, dict[str, Any], EngineMaker]:
        if not isinstance(about, dict) or set(about) != _ABOUT or about["metric"] not in METRICS:
            raise IndexFileError(f"cannot load an index from {str(path)!r}: it is described by {about!r:.300}")
        try:
            make = described_maker(about["engine"])
            tensors = _tensors(os.path.join(folder, VECTORS), about, mapped)
            entries = _entries(os.path.join(folder, ENTRIES), tensors, about["count"])
        except (ConfigError, NonFiniteError) as error:
            raise IndexFileError(f"cannot load an index from {str(path)!r}: {error}") from error
        file = os.path.join(folder, ENGINE)
        if not os.path.exists(file):
            return State.made(entries, about["metric"], make), about, make
        part = _part(file, make, tensors, about, mapped)
        return State.around(entries, about["metric"], part, make), about, make

    save, (state, about, make) = read_version(path, read)
    return {os.path.realpath(path): save}, state, about, make


def _tensors(path: str, about: dict[str, Any], mapped: bool) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    shapes, _ = read_header(path, TENSOR_FORMAT)
    vectors = shapes.get("vectors", ((), None))
    if vectors != ((about["count"], about["dim"]), torch.float32):
        raise IndexFileError(
            f"cannot read {path!r}: it holds vectors {vectors[0]}, and {about['count']} of width {about['dim']} were "
            "saved"
        )
    # The checksum of the whole file was compared before: what is mapped now is what was written.
    tensors = load_file(path)
    for name, tensor in tensors.items():
        check_values(name, tensor)
        if not mapped or name != "vectors":
            tensors[name] = tensor.clone()
    return tensors


def _entries(path: str, tensors: dict[str, Tensor], count: int) -> Entries:
    ids, texts, metadata = [], [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                entry = json.loads(line)
                ids.append(entry["id"])
                texts.append(entry["text"])
                metadata.append(entry["metadata"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise IndexFileError(f"cannot read {path!r}: line {number + 1} is not an entry: {error}") from error
    if len(ids) != count or len(set(ids)) != count:
        raise IndexFileError(
            f"cannot read {path!r}: it holds {len(ids)} entries with {len(set(ids))} ids, and {count} were saved"
        )
    tokens = tensors["tokens"].split(tensors["lengths"].tolist()) if "tokens" in tensors else None
    if tokens is not None and len(tokens) != count:
        raise IndexFileError(f"cannot read the tokens beside {path!r}: they are of {len(tokens)} entries of {count}")
    return Entries(tuple(ids), tuple(texts), tuple(metadata), tensors["vectors"], tokens)


def _part(path: str, make: EngineMaker, tensors: dict[str, Tensor], about: dict[str, Any], mapped: bool) -> Part:
    rows = tensors.get("rows")
    if not isinstance(make, (Flat, HNSW, IVFPQ)) or rows is None:
        raise IndexFileError(f"cannot read {path!r}: it belongs to engine {about['engine']!r:.200}, which has no file")
    try:
        engine = read_engine(make, path, about["metric"], mapped)
    except RuntimeError as error:
        raise IndexFileError(f"cannot read {path!r}: faiss says {error}") from error
    if len(engine) != len(rows) or engine.index.d != about["dim"] or not ((rows >= -1) & (rows < about["count"])).all():
        raise IndexFileError(
            f"cannot read {path!r}: it knows {len(engine)} vectors of width {engine.index.d}, and {len(rows)} of width "
            f"{about['dim']} were saved"
        )
    return Part(engine, rows)
