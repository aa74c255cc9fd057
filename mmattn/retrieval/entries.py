"""The entries of an index as columns (ids, texts, metadata, vectors), and the checks of what goes into them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexMismatchError, ShapeError, TextError
from mmattn.memory import Memory
from mmattn.storage.json_files import dump_json

Id = str | int
Filter = Mapping[str, Any] | Callable[[Any], bool]

MAX_METADATA = 4 << 30


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
    metadata: Any
    vector: Tensor
    tokens: Tensor | None


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
    metadata: tuple[Any, ...]
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
        return Entries(
            self.ids + other.ids,
            self.texts + other.texts,
            self.metadata + other.metadata,
            torch.cat([self.vectors, other.vectors]),
            None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
        )

    def select(self, rows: Sequence[int]) -> Entries:
        """Return the entries of some rows, in their order."""
        rows = list(rows)
        return Entries(
            tuple(self.ids[row] for row in rows),
            tuple(self.texts[row] for row in rows),
            tuple(self.metadata[row] for row in rows),
            self.vectors[rows],
            None if self.tokens is None else tuple(self.tokens[row] for row in rows),
        )

    def replaced(self, rows: Sequence[int], **columns: Any) -> Entries:
        """Return these entries with new values in some rows of some columns."""
        new: dict[str, Any] = {name: getattr(self, name) for name in ("texts", "metadata", "vectors", "tokens")}
        for name, values in columns.items():
            if name == "vectors":
                new[name] = self.vectors.clone()
                new[name][list(rows)] = values
            elif values is not None:
                column = list(new[name])
                for row, value in zip(rows, values, strict=True):
                    column[row] = value
                new[name] = tuple(column)
        return Entries(self.ids, **new)

    def to(self, device: torch.device) -> Entries:
        """Return the same entries with vectors and tokens on a device."""
        tokens = None if self.tokens is None else tuple(part.to(device) for part in self.tokens)
        return Entries(self.ids, self.texts, self.metadata, self.vectors.to(device), tokens)

    def allowed(self, filter: Filter | None) -> Tensor | None:
        """Return which entries (n,) a filter allows, True = may be found; None where it allows all.

        Args:
            filter: a dict of metadata that must be equal, as Python compares, so that {} allows all; or a function of
                an entry's metadata.

        Raises:
            ConfigError: the filter is neither a dict nor a function.
        """
        if filter is None:
            return None
        if isinstance(filter, Mapping):
            allowed = [_matches(metadata, filter) for metadata in self.metadata]
        elif callable(filter):
            allowed = [bool(filter(copied(metadata))) for metadata in self.metadata]
        else:
            raise ConfigError(
                f"filter must be a dict of metadata that must be equal, or a function of an entry's metadata; got "
                f"{type(filter).__name__}"
            )
        return torch.tensor(allowed, dtype=torch.bool, device=self.vectors.device)


def copied(value: Any) -> Any:
    """Return a deep copy of a JSON value."""
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def _matches(metadata: Any, wanted: Mapping[str, Any]) -> bool:
    if not wanted:
        return True
    return isinstance(metadata, dict) and all(key in metadata and metadata[key] == wanted[key] for key in wanted)


def is_id(name: object) -> bool:
    """Tell whether an object may be an id: True is not 1, and 1.0 neither."""
    return isinstance(name, (str, int)) and not isinstance(name, bool)


def check_ids(ids: Iterable[object], count: int) -> tuple[Id, ...]:
    """Return the ids of new entries as a tuple of unique texts and ints."""
    names = tuple(_as_list("ids", ids))
    for row, name in enumerate(names):
        if not is_id(name):
            raise IndexMismatchError(f"ids are text or ints, got {name!r:.80} ({type(name).__name__}) at row {row}")
    if len(names) != count:
        raise IndexMismatchError(f"each entry needs one id: got {len(names)} ids for {count} entries")
    _refuse_duplicates(names)
    return names


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


def check_texts(texts: Iterable[object], count: int | None = None, *, optional: bool = False) -> tuple[str | None, ...]:
    """Return texts as a tuple; `optional` allows None for an entry without a text."""
    values = tuple(_as_list("texts", texts))
    for row, text in enumerate(values):
        if not isinstance(text, str) and not (optional and text is None):
            raise TextError(f"text {row} must be a string, got {text!r:.80} ({type(text).__name__}); leave the row out")
    if count is not None and len(values) != count:
        raise TextError(f"each entry needs one text: got {len(values)} texts for {count} entries")
    return values


def check_metadata(metadata: Iterable[object], count: int) -> tuple[Any, ...]:
    """Return metadata as a tuple of plain JSON values, copied."""
    values = tuple(_as_list("metadata", metadata))
    if len(values) != count:
        raise ConfigError(f"each entry needs one value of metadata: got {len(values)} for {count} entries")
    try:
        return tuple(json.loads(dump_json("metadata", values, MAX_METADATA)))
    except ConfigError:
        for row, value in enumerate(values):
            dump_json(f"metadata {row}", value, MAX_METADATA)  # names the row
        raise


def check_filter(filter: Filter | None) -> Filter | None:
    """Return a filter as JSON, with which metadata is compared; functions stay as they are."""
    if not isinstance(filter, Mapping):
        return filter
    try:
        plain: dict[str, Any] = json.loads(dump_json("filter", dict(filter), MAX_METADATA))
    except ConfigError as error:
        raise ConfigError(f"{error}; metadata is JSON, and a filter is compared with it") from error
    return plain


def check_tokens(tokens: object, count: int) -> tuple[Tensor, ...]:
    """Return the real slots (m, e') of each row of a memory, copied to the CPU."""
    if not isinstance(tokens, Memory):
        raise ShapeError(f"tokens must be a Memory with one row per entry, got {type(tokens).__name__}")
    if tokens.batch != count:
        raise ShapeError(f"tokens must have one row per entry: got {tokens.batch} rows for {count} entries")
    tokens.check_finite()
    mask = tokens.mask
    rows = [tokens.tokens[i] if mask is None else tokens.tokens[i][mask[i]] for i in range(count)]
    return tuple(row.detach().to("cpu", copy=True) for row in rows)


def check_lines(entries: Entries) -> None:
    """Refuse ids and texts with half a surrogate pair, which no file can hold."""
    for row, line in enumerate(zip(entries.ids, entries.texts, strict=True)):
        try:
            "".join(str(part) for part in line if part is not None).encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"entry {row} has half a surrogate pair in its id or text; repair it: "
                "text.encode('utf-8', 'replace').decode()"
            ) from error


def _as_list(what: str, values: object) -> Iterable[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{what} must be a list with one value per entry, got {type(values).__name__}")
    return values


def _refuse_duplicates(names: Sequence[Id]) -> None:
    if len(set(names)) != len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise IndexMismatchError(f"ids must be unique, and {_listed(twice)} is given more than once; nothing changed")


def _listed(names: Sequence[Id]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
