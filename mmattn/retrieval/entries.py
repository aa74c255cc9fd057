"""The entries of an index as columns (ids, texts, metadata, vectors): checks of what goes into them, and files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, TypeGuard, TypeVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, IndexMismatchError, MmattnError, ShapeError
from mmattn.memory import Memory
from mmattn.retrieval.scoring import check_vectors
from mmattn.storage.files import replacing
from mmattn.storage.json_files import dump_json, parse_json
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.tokenization import check_text

Value = TypeVar("Value")
Id = str | int
Filter = Mapping[str, object] | Callable[..., bool]

MAX_METADATA = 4 << 30

_VECTORS, _ENTRIES = "vectors.safetensors", "entries.jsonl"
_TENSOR_FORMAT = "mmattn-index-vectors"
_COLUMNS = ("id", "text", "metadata")


class Entry(NamedTuple):
    """One entry of an index.

    Attributes:
        id: its name, a text or an int.
        text: its text, or None.
        metadata: a JSON value.
        vector: (e,) float32.
        tokens: its encoded tokens (m, e'), or None.
    """

    id: Id
    text: str | None
    metadata: object
    vector: Tensor
    tokens: Tensor | None


class Columns(TypedDict, total=False):
    """Columns of entries, without their ids."""

    texts: tuple[str | None, ...]
    metadata: tuple[object, ...]
    vectors: Tensor
    tokens: tuple[Tensor, ...] | None


@dataclass(frozen=True, eq=False)
class Entries:
    """The columns of n entries, in the order of adding. Columns never change; a change makes new ones.

    Attributes:
        ids: unique names.
        texts: texts, None where an entry has none.
        metadata: a JSON value per entry.
        vectors: (n, e) float32, the vectors that are searched.
        tokens: encoded tokens (m, e') of each entry, or None.
    """

    ids: tuple[Id, ...]
    texts: tuple[str | None, ...]
    metadata: tuple[object, ...]
    vectors: Tensor
    tokens: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def rows(self) -> dict[Id, int]:
        """The row of each id."""
        return {name: row for row, name in enumerate(self.ids)}

    def entry(self, row: int) -> Entry:
        """Return the entry of a row."""
        tokens = None if self.tokens is None else self.tokens[row]
        return Entry(self.ids[row], self.texts[row], copied(self.metadata[row]), self.vectors[row], tokens)

    def concat(self, other: Entries) -> Entries:
        """Return these entries followed by others with other ids."""
        if not len(self) or not len(other):
            return self if len(self) else other
        tokens = None if self.tokens is None or other.tokens is None else self.tokens + other.tokens
        vectors = torch.cat([self.vectors, other.vectors])
        return Entries(self.ids + other.ids, self.texts + other.texts, self.metadata + other.metadata, vectors, tokens)

    def select(self, rows: Sequence[int]) -> Entries:
        """Return the entries of these rows, in their order."""
        rows = list(rows)
        ids, texts, metadata, tokens = (
            _selected(column, rows) for column in (self.ids, self.texts, self.metadata, self.tokens)
        )
        return Entries(ids, texts, metadata, self.vectors[rows], tokens)

    def replaced(self, rows: Sequence[int], columns: Columns) -> Entries:
        """Return these entries with new values in these rows of the given columns."""
        vectors = self.vectors
        if "vectors" in columns:
            vectors = vectors.clone()
            vectors[list(rows)] = columns["vectors"]
        return Entries(
            self.ids,
            _replaced(self.texts, rows, columns.get("texts")),
            _replaced(self.metadata, rows, columns.get("metadata")),
            vectors,
            self.tokens and _replaced(self.tokens, rows, columns.get("tokens")),
        )

    def to(self, device: torch.device) -> Entries:
        """Return the same entries with vectors and tokens on a device."""
        tokens = None if self.tokens is None else tuple(part.to(device) for part in self.tokens)
        return Entries(self.ids, self.texts, self.metadata, self.vectors.to(device), tokens)

    def allowed(self, filter: Filter | None) -> Tensor | None:
        """Return which entries (n,) a filter allows, True = may be found; None where it allows all.

        Args:
            filter: a dict, as for `Index.search`; or a function of an entry's metadata.

        Raises:
            ConfigError: the filter is neither, or no entry has one of its keys.
        """
        if filter is None:
            return None
        if isinstance(filter, Mapping):
            allowed = [_matches(metadata, filter) for metadata in self.metadata]
            if allowed and not any(allowed):
                check_keys(
                    filter, {key for metadata in self.metadata if isinstance(metadata, dict) for key in metadata}
                )
        elif callable(filter):
            allowed = [bool(filter(copied(metadata))) for metadata in self.metadata]
        else:
            raise ConfigError(
                f"filter must be a dict of metadata that must be equal, or a function of an entry's metadata; got "
                f"{type(filter).__name__}"
            )
        return torch.tensor(allowed, dtype=torch.bool, device=self.vectors.device)


def copied(value: object) -> object:
    """Return a deep copy of a JSON value."""
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    return [copied(part) for part in value] if isinstance(value, list) else value


def _selected(column: Any, rows: list[int]) -> Any:
    return column and tuple(column[row] for row in rows)


def _replaced(column: tuple[Value, ...], rows: Sequence[int], values: Sequence[Value] | None) -> tuple[Value, ...]:
    if values is None:
        return column
    new = dict(zip(rows, values, strict=True))
    return tuple(new.get(row, value) for row, value in enumerate(column))


def _matches(metadata: object, filter: Mapping[str, object]) -> bool:
    if not filter:
        return True
    return isinstance(metadata, dict) and all(
        any(value in values_of(wanted) for value in values_of(metadata.get(key, []))) for key, wanted in filter.items()
    )


def values_of(value: object) -> list[object]:
    """Return the values of a filter, or of an entry's metadata; any of them may match."""
    return value if isinstance(value, list) else [value]


def check_keys(filter: Mapping[str, object], known: Collection[str]) -> None:
    """Raise ConfigError for the first key of a filter that no entry has."""
    for key in filter:
        if key not in known:
            keys_text = f"their keys are {_listed(sorted(known))}" if known else "they have no metadata"
            raise ConfigError(f"filter has the key {key!r}, which no entry has: {keys_text}")


def is_id(name: object) -> TypeGuard[Id]:
    """Tell whether an object may be an id: True is not 1, and 1.0 neither."""
    return isinstance(name, (str, int)) and not isinstance(name, bool)


def check_ids(ids: object, count: int) -> tuple[Id, ...]:
    """Return the ids of new entries as a tuple of unique texts and ints."""
    names = as_list("ids", ids, count)
    for row, name in enumerate(names):
        if not is_id(name):
            raise IndexMismatchError(f"ids are text or ints, got {name!r:.80} ({type(name).__name__}) at row {row}")
    check_text([str(name) for name in names])
    _refuse_duplicates(names)
    return tuple(names)


def check_known(names: Sequence[Id], known: Collection[Id]) -> None:
    """Refuse ids that are not in the index, and duplicates."""
    unknown = [name for name in names if not is_id(name) or name not in known]
    if unknown:
        raise IndexMismatchError(
            f"the index has no entry {_listed(unknown)}, of {len(names)} given ids (it has {len(known)} entries, "
            f"{_listed(list(known))}); nothing was changed"
        )
    _refuse_duplicates(names)


def check_new(names: Sequence[Id], known: Collection[Id]) -> None:
    """Refuse ids that are in the index already."""
    present = [name for name in names if name in known]
    if present:
        raise IndexMismatchError(
            f"the index already has an entry {_listed(present)}, of {len(names)} given ids; to replace entries use "
            "update. Nothing was changed"
        )


def check_texts(texts: object, count: int) -> tuple[str | None, ...]:
    """Return texts as a tuple, with None for an entry without a text."""
    values = as_list("texts", texts, count)
    check_text(["" if text is None else text for text in values])
    return tuple(values)


def check_metadata(metadata: object, count: int) -> tuple[object, ...]:
    """Return metadata as a tuple of plain JSON values, copied."""
    values = enumerate(as_list("metadata", metadata, count))
    return tuple(json.loads(dump_json(f"metadata {row}", value, MAX_METADATA)) for row, value in values)


def check_filter(filter: Filter | None) -> Filter | None:
    """Return a filter as JSON, with which metadata is compared; functions stay as they are."""
    if not isinstance(filter, Mapping):
        return filter
    return json.loads(dump_json("filter", dict(filter), MAX_METADATA))


def check_tokens(tokens: object, count: int) -> tuple[Tensor, ...]:
    """Return the real slots (m, e') of each row of a memory, copied to the CPU."""
    if not isinstance(tokens, Memory):
        raise ShapeError(f"tokens must be a Memory with one row per entry, got {type(tokens).__name__}")
    if tokens.batch != count:
        raise ShapeError(f"tokens must have one row per entry: got {tokens.batch} rows for {count} entries")
    tokens.check_finite()
    rows = [row[real] for row, real in zip(tokens.tokens, tokens.real_slots(), strict=True)]
    return tuple(row.detach().to("cpu", copy=True) for row in rows)


def as_list(what: str, values: object, count: int | None = None) -> list[Any]:
    """Return values that are a list of some kind, of this length."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{what} must be a list with one value per entry, got {type(values).__name__}")
    values = list(values)
    if count not in (None, len(values)):
        raise IndexMismatchError(f"{what} need one value per entry: got {len(values)} for {count} entries")
    return values


def _refuse_duplicates(names: Sequence[Id]) -> None:
    if len(set(names)) != len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise IndexMismatchError(f"ids must be unique, and {_listed(twice)} is given more than once; nothing changed")


def _listed(names: Sequence[Id]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")


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
    columns: dict[str, list[object]] = {name: [] for name in _COLUMNS}
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                entry = parse_json(f"line {number}", raw, MAX_METADATA)
                if not isinstance(entry, dict) or set(entry) != set(columns):
                    raise IndexFileError(f"line {number} is not an object of {', '.join(columns)}")
                for name, value in entry.items():
                    columns[name].append(value)
        ids = check_ids(columns["id"], len(vectors))
        texts = check_texts(columns["text"], len(vectors))
    except (MmattnError, OSError) as error:
        raise IndexFileError(f"cannot read {path!r}: {error}") from error
    return Entries(ids, texts, tuple(columns["metadata"]), vectors, tokens)
