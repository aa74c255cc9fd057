"""Entries as files: vectors and encoded tokens as safetensors, and ids, texts and metadata as JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import IndexFileError, MmattnError
from mmattn.retrieval.embedding_space import check_vectors
from mmattn.retrieval.entries import MAX_METADATA, Entries, check_ids, check_texts
from mmattn.storage.files import replacing
from mmattn.storage.json_files import parse_json
from mmattn.storage.safetensors import read_tensors, write_tensors

_VECTORS, _ENTRIES = "vectors.safetensors", "entries.jsonl"
_TENSOR_FORMAT = "mmattn-index-vectors"
_COLUMNS = ("id", "text", "metadata")


def write_entries(folder: str, entries: Entries, **more: Tensor) -> None:
    """Write entries into a folder, and further tensors of a store."""
    tensors = {"vectors": entries.vectors, **more}
    if entries.tokens:
        tensors["tokens"] = torch.cat(entries.tokens)
        tensors["lengths"] = torch.tensor([len(part) for part in entries.tokens])
    write_tensors(os.path.join(folder, _VECTORS), tensors, {"format": _TENSOR_FORMAT})
    with replacing(os.path.join(folder, _ENTRIES)) as file:
        for row in zip(entries.ids, entries.texts, entries.metadata, strict=True):
            line = dict(zip(_COLUMNS, row, strict=True))
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def read_entries(
    folder: str, dim: int, metric: str, mapped: bool, more: Collection[str] = ()
) -> tuple[Entries, dict[str, Tensor]]:
    """Return the entries in a folder and the further tensors named `more`; `mapped` leaves the vectors on the disk."""
    path = os.path.join(folder, _VECTORS)
    try:
        tensors, _ = read_tensors(path, _TENSOR_FORMAT, mapped=mapped)
        vectors = tensors.pop("vectors", torch.empty(0))
        if vectors.dtype != torch.float32 or vectors.dim() != 2 or vectors.shape[1] != dim:
            raise IndexFileError(
                f"it holds vectors {tuple(vectors.shape)}, {vectors.dtype}, and float32 of width {dim} were saved"
            )
        check_vectors("vectors", vectors, metric)
        tokens = _split(tensors.pop("tokens", None), tensors.pop("lengths", None), len(vectors))
        if set(tensors) != set(more):
            raise IndexFileError(f"beside the vectors it holds {sorted(tensors)[:5]}, and {sorted(more)} were saved")
    except MmattnError as error:
        raise IndexFileError(f"cannot read {path!r}: {error}") from error
    return _read_lines(os.path.join(folder, _ENTRIES), vectors, tokens), tensors


def _split(tokens: Tensor | None, lengths: Tensor | None, count: int) -> tuple[Tensor, ...] | None:
    """Return the encoded tokens of each entry."""
    if tokens is None and lengths is None:
        return None
    if tokens is None or tokens.dim() != 2 or not tokens.is_floating_point():
        raise IndexFileError("its encoded tokens are no float tensor (m, e')")
    if lengths is None or lengths.dtype != torch.int64 or lengths.shape != (count,) or bool((lengths < 0).any()):
        raise IndexFileError(f"its encoded tokens are not those of {count} entries")
    if int(lengths.sum()) != len(tokens):
        raise IndexFileError(f"it holds {len(tokens)} encoded tokens, and its entries have {int(lengths.sum())}")
    return tokens.split(lengths.tolist())


def _read_lines(path: str, vectors: Tensor, tokens: tuple[Tensor, ...] | None) -> Entries:
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                entry = parse_json(f"line {number}", raw, MAX_METADATA)
                if not isinstance(entry, dict) or set(entry) != set(columns):
                    raise IndexFileError(f"line {number} is not an object of {', '.join(columns)}")
                for name, value in entry.items():
                    columns[name].append(value)
        if len(columns["id"]) != len(vectors):
            raise IndexFileError(f"it holds {len(columns['id'])} entries, and {len(vectors)} were saved")
        ids = check_ids(columns["id"], len(vectors))
        texts = check_texts(columns["text"], optional=True)
    except (MmattnError, OSError) as error:
        raise IndexFileError(f"cannot read {path!r}: {error}") from error
    return Entries(ids, texts, tuple(columns["metadata"]), vectors, tokens)
