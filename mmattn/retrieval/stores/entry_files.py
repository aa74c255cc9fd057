"""Entries as files: the vectors and encoded tokens as safetensors, the rest as JSON lines.

vectors.safetensors  vectors (n, e), and encoded tokens where there are any; and what else a store puts there
entries.jsonl        id, text and metadata of each entry, one JSON object per line
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import IndexFileError, MmattnError
from mmattn.retrieval.embedding_space import check_vectors
from mmattn.retrieval.entries import Entries
from mmattn.retrieval.entry_checks import check_ids, check_lines, check_texts
from mmattn.storage.files import replacing
from mmattn.storage.safetensors import check_values, read_header, write_tensors

_VECTORS, _ENTRIES = "vectors.safetensors", "entries.jsonl"
_TENSOR_FORMAT = "mmattn-index-vectors"


def write_entries(folder: str, entries: Entries, **more: Tensor) -> None:
    """Write entries into a folder.

    Args:
        folder: where.
        entries: what.
        **more: further tensors, by name.
    """
    tensors = {"vectors": entries.vectors, **more}
    if entries.tokens:
        tensors["tokens"] = torch.cat(entries.tokens)
        tensors["lengths"] = torch.tensor([len(part) for part in entries.tokens])
    write_tensors(os.path.join(folder, _VECTORS), tensors, {"format": _TENSOR_FORMAT})
    with replacing(os.path.join(folder, _ENTRIES)) as file:
        for row in zip(entries.ids, entries.texts, entries.metadata, strict=True):
            line = dict(zip(("id", "text", "metadata"), row, strict=True))
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def read_copy(folder: str, dim: int, metric: str, mapped: bool) -> Entries:
    """The entries in a folder to which `write_entries` was given nothing else, as the copy of a database has them.

    Args:
        folder: where.
        dim: width e of the vectors.
        metric: how they are compared.
        mapped: as for `read_entries`.

    Raises:
        IndexFileError: as for `read_entries`, or there is more.
    """
    entries, more = read_entries(folder, dim, metric, mapped)
    if more:
        raise IndexFileError(f"the vectors in {folder!r} lie beside {sorted(more)[:5]}, which are of another store")
    return entries


def read_entries(folder: str, dim: int, metric: str, mapped: bool) -> tuple[Entries, dict[str, Tensor]]:
    """The entries that `write_entries` wrote into a folder, and the further tensors.

    Args:
        folder: where.
        dim: width e of the vectors.
        metric: how they are compared, which says what vectors may be.
        mapped: leave the vectors on the disk.

    Raises:
        IndexFileError: the files are not what `write_entries` writes.
    """
    path = os.path.join(folder, _VECTORS)
    try:
        tensors = _read_tensors(path, mapped)
        vectors = tensors.pop("vectors", torch.empty(0))
        if vectors.dtype != torch.float32 or vectors.dim() != 2 or vectors.shape[1] != dim:
            raise IndexFileError(
                f"it holds vectors {tuple(vectors.shape)}, {vectors.dtype}, and float32 of width {dim} were saved"
            )
        check_vectors("vectors", vectors, metric)
        tokens = _tokens(tensors.pop("tokens", None), tensors.pop("lengths", None), len(vectors))
    except MmattnError as error:
        raise IndexFileError(f"cannot read {path!r}: {error}") from error
    return _read_lines(os.path.join(folder, _ENTRIES), vectors, tokens), tensors


def _read_tensors(path: str, mapped: bool) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    read_header(path, _TENSOR_FORMAT)
    # The checksum of the whole file was compared before: what is mapped now is what was written.
    tensors = load_file(path)
    for name, tensor in tensors.items():
        check_values(name, tensor)
        if not mapped or name != "vectors":
            tensors[name] = tensor.clone()
    return tensors


def _tokens(tokens: Tensor | None, lengths: Tensor | None, count: int) -> tuple[Tensor, ...] | None:
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
    columns: dict[str, list[Any]] = {"id": [], "text": [], "metadata": []}
    decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    entry = decoder.decode(raw.decode())
                    if not isinstance(entry, dict) or set(entry) != set(columns):
                        raise ValueError(f"it is not an object of {', '.join(columns)}")
                    if b"\\u" in raw:
                        json.dumps(entry, ensure_ascii=False).encode()  # half a surrogate pair cannot be saved again
                except (ValueError, RecursionError) as error:
                    raise IndexFileError(f"line {number} is not an entry: {error}") from error
                for name, value in entry.items():
                    columns[name].append(value)
        if len(columns["id"]) != len(vectors):
            raise IndexFileError(f"it holds {len(columns['id'])} entries, and {len(vectors)} were saved")
        ids = check_ids(columns["id"], len(vectors))
        texts = check_texts(columns["text"], optional=True)
        entries = Entries(ids, texts, tuple(columns["metadata"]), vectors, tokens)
        check_lines(entries)
    except (MmattnError, OSError) as error:
        raise IndexFileError(f"cannot read {path!r}: {error}") from error
    return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
