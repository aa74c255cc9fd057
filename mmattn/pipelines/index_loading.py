"""Indexes that adapters answer from: loaded, and built of JSON lines in the way in which an adapter reads entries."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders import registry as named
from mmattn.encoders.registry import AnyTextEncoder
from mmattn.errors import AdapterFileError, ConfigError, TextError
from mmattn.memory import Memory
from mmattn.pipelines.build import check_encoder, resolve
from mmattn.pipelines.config import PipelineConfig
from mmattn.retrieval.index import Index
from mmattn.storage.files import open_regular
from mmattn.storage.json_files import MAX_JSON, parse_json

_WANTED = "an index for an adapter is made of JSON objects, one on each line"


def load_index(index: Index | str | PathLike[str], encoder: AnyTextEncoder) -> Index:
    """An index with its encoder.

    Args:
        index: the index, its folder, or its address: see `Index.open`.
        encoder: of the questions.

    Raises:
        IndexFileError: none is there.
        IndexMismatchError: it was built with another encoder.
    """
    return index if isinstance(index, Index) else Index.open(index, encoder=encoder)


def load_text_encoder(
    config: PipelineConfig, folder: Path, fingerprint: str | None, device: Any = None
) -> AnyTextEncoder:
    """The encoder of the texts of an index.

    Args:
        config: what the adapter's folder says.
        folder: of the adapter.
        fingerprint: as in `check_encoder`.
        device: where it runs.

    Raises:
        AdapterFileError: nothing to load, or it has changed since the training.
    """
    encoder = named.load_text_encoder(resolve(config.encoder.name, folder), config.encoder.pooling, device)
    check_encoder(encoder, config.encoder.name, folder, fingerprint)
    return encoder


def read_entries(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The JSON objects of a file, one on each line; blank lines are left out.

    Args:
        path: of the file, in UTF-8.

    Raises:
        TextError: a line that is no JSON object, or no line at all.
        AdapterFileError: no such file.
    """
    rows: list[dict[str, Any]] = []
    with open_regular(path) as (file, _):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(f"line {number} of {str(path)!r}", line.removeprefix(codecs.BOM_UTF8), MAX_JSON)
            except AdapterFileError as error:
                raise TextError(f"{error}; {_WANTED}") from error
            if not isinstance(row, dict):
                raise TextError(f"line {number} of {str(path)!r} must be a JSON object, got {row!r:.60}")
            rows.append(row)
    if not rows:
        raise TextError(f"{str(path)!r} has no entries; {_WANTED}")
    return rows


def build_index(
    rows: Iterable[Mapping[str, Any]],
    config: PipelineConfig,
    encoder: AnyTextEncoder,
    *,
    store: str | None = None,
    progress: bool = False,
) -> Index:
    """An index whose entries an adapter reads: found by their first field, with the vectors of all fields as a token.

    Args:
        rows: JSON objects with the fields that the adapter reads, and where they have them "id" and "text".
        config: what the adapter's folder says.
        encoder: of the texts.
        store: as in `Index.build`.
        progress: show a bar.

    Raises:
        ConfigError: the adapter reads no fields.
        TextError: a row without one of them.
    """
    memory = config.memory
    if memory is None or memory.fields is None:
        raise ConfigError(
            f"an adapter for {config.task} reads no entries made of fields; build an index without --for, or ask the "
            "one that its own run left"
        )
    known = list(rows)
    for number, row in enumerate(known):
        lacks = [field for field in memory.fields if not isinstance(row.get(field), str) or not row[field].strip()]
        if lacks:
            raise TextError(
                f"entry {number} has no {' and no '.join(lacks)}, and this adapter reads {' and '.join(memory.fields)} "
                f"of each entry; got {dict(row)!r:.120}"
            )
    parts = [_vectors(encoder, [row[field] for row in known], progress) for field in memory.fields]
    template = memory.text or ": ".join(f"{{{field}}}" for field in memory.fields)
    texts = [row.get("text") or template.format(**{field: row[field] for field in memory.fields}) for row in known]
    ids = [row["id"] for row in known] if known and all("id" in row for row in known) else None
    tokens = Memory(torch.cat(parts, -1)[:, None]) if known else None
    return Index.build(parts[0] if known else [], encoder=encoder, ids=ids, texts=texts, tokens=tokens, store=store)


def _vectors(encoder: AnyTextEncoder, texts: list[str], progress: bool) -> Tensor:
    """Vectors (n, e) of texts, each different one encoded once."""
    different = list(dict.fromkeys(texts))
    number = {text: row for row, text in enumerate(different)}
    encoded = encoder.encode(different, batch_size=128, progress=progress).tokens[:, 0]
    return encoded[[number[text] for text in texts]].cpu()
