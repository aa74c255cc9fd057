"""Pipelines that answer from an index, and indexes built of JSON lines with the fields that an adapter reads."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders import registry
from mmattn.encoders.base import TextEncoderBase
from mmattn.errors import AdapterFileError, ConfigError, TextError
from mmattn.memory import Memory
from mmattn.pipelines.base import Pipeline
from mmattn.pipelines.build import check_encoder, resolve, saved_fingerprint
from mmattn.pipelines.config import MemoryConfig, PipelineConfig
from mmattn.retrieval.index import Index
from mmattn.storage.files import open_regular
from mmattn.storage.json_files import MAX_JSON, parse_json

_FORMAT = "an index for an adapter is made of JSON objects, one on each line"


class IndexPipeline(Pipeline):
    """A pipeline that answers from an index. Further arguments as for `Pipeline`.

    Args:
        index: the index, its folder or its address; or give one at each call.

    Attributes:
        encoder: of the texts of the index.

    Raises:
        AdapterFileError: the encoder has changed since the training.
        ConfigError: the entries of the index have no encoded tokens, which the adapter reads.
    """

    def __init__(self, *args: Any, index: Index | str | PathLike[str] | None = None) -> None:
        super().__init__(*args)
        self.encoder = load_text_encoder(self.config, self.folder, saved_fingerprint(self.folder), self.device)
        self.index = None if index is None else self._load_index(index)

    def _load_index(self, index: Index | str | PathLike[str]) -> Index:
        loaded = index if isinstance(index, Index) else Index.open(index, encoder=self.encoder)
        assert self.config.memory is not None
        if self.config.memory.fields and len(loaded) and not loaded.has_tokens:
            fields = " and ".join(self.config.memory.fields)
            raise ConfigError(
                f"the entries of {index} have no encoded tokens. Build one of JSON lines with {fields}: "
                f"mmattn index build FILE -o DIR --for {shlex.quote(str(self.folder))}"
            )
        return loaded

    def _chosen_index(self, index: Index | str | PathLike[str] | None) -> Index:
        """Return the index of a call, or that of the pipeline."""
        chosen = self.index if index is None else self._load_index(index)
        if chosen is None:
            raise ConfigError(
                f"the adapter in {str(self.folder)!r} reads an index, and there is none: give index=, such as the one "
                f"of its run, or one made by: mmattn index build FILE -o DIR --for {shlex.quote(str(self.folder))}"
            )
        return chosen


def load_text_encoder(
    config: PipelineConfig, folder: Path, fingerprint: str | None, device: torch.device | str | None = None
) -> TextEncoderBase:
    """Load the encoder of the texts of an index; a `fingerprint` other than that of its training raises."""
    reference = config.encoder
    encoder = registry.load_text_encoder(resolve(reference.name, folder), reference.pooling, device)
    check_encoder(encoder, reference.name, folder, fingerprint)
    return encoder


def read_entries(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one on each line; blank lines are left out.

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
                raise TextError(f"{error}; {_FORMAT}") from error
            if not isinstance(row, dict):
                raise TextError(f"line {number} of {str(path)!r} must be a JSON object, got {row!r:.60}")
            rows.append(row)
    if not rows:
        raise TextError(f"{str(path)!r} has no entries; {_FORMAT}")
    return rows


def build_index(
    rows: Iterable[Mapping[str, Any]],
    config: PipelineConfig,
    encoder: TextEncoderBase,
    *,
    store: str | None = None,
    progress: bool = False,
) -> Index:
    """Build an index for an adapter: searched by the first field, with the vectors of all fields as one token.

    For an adapter whose host reads the texts ("passage-answering"), it is an index of the field "text".

    Args:
        rows: JSON objects with the fields that the adapter reads, and optionally "id" and "text".
        config: settings in the folder of the adapter.
        encoder: of the texts.
        store: as in `Index.build`.
        progress: show a bar.

    Raises:
        ConfigError: the adapter reads no fields.
        TextError: a row without one of them.
    """
    memory, fields = _fields(config)
    entries = list(rows)
    _check_fields(entries, fields)
    ids = [row["id"] for row in entries] if entries and all("id" in row for row in entries) else None
    if config.task == "passage-answering":
        return Index.build([row["text"] for row in entries], encoder=encoder, ids=ids, store=store)
    vectors = [_encode_unique(encoder, [row[field] for row in entries], progress) for field in fields]
    template = memory.text or ": ".join(f"{{{field}}}" for field in fields)
    texts = [row.get("text") or template.format_map(row) for row in entries]
    tokens = Memory(torch.cat(vectors, -1)[:, None]) if entries else None
    return Index.build(vectors[0] if entries else [], encoder=encoder, ids=ids, texts=texts, tokens=tokens, store=store)


def _fields(config: PipelineConfig) -> tuple[MemoryConfig, Sequence[str]]:
    """Return the fields of an entry that an adapter reads."""
    fields = None if config.memory is None else config.memory.fields
    if config.task == "passage-answering":
        fields = ("text",)
    if config.memory is None or fields is None:
        raise ConfigError(
            f"an adapter for {config.task} reads no entries made of fields: build an index without --for, or use that "
            "of its run"
        )
    return config.memory, fields


def _check_fields(entries: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Raise TextError for an entry without one of the fields."""
    for number, row in enumerate(entries):
        lacks = [field for field in fields if not isinstance(row.get(field), str) or not row[field].strip()]
        if lacks:
            raise TextError(
                f"entry {number} has no {' and no '.join(lacks)}, and this adapter reads {' and '.join(fields)} of "
                f"each; got {dict(row)!r:.120}"
            )


def _encode_unique(encoder: TextEncoderBase, texts: list[str], progress: bool) -> Tensor:
    """Return vectors (n, e) of n texts; equal texts are encoded once."""
    unique = list(dict.fromkeys(texts))
    number = {text: row for row, text in enumerate(unique)}
    vectors = encoder.encode(unique, batch_size=128, progress=progress).tokens[:, 0]
    return vectors[[number[text] for text in texts]].cpu()
