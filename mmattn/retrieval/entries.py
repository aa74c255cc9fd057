"""What an index holds, as columns: ids, texts, metadata, vectors. Columns never change; every change makes new ones."""

from __future__ import annotations

import json
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
    """One entry: its id, text, metadata, vector (e,), and encoded tokens (m, e') where it has them."""

    id: Id
    text: str | None
    metadata: Any
    vector: Tensor
    tokens: Tensor | None


@dataclass(frozen=True, eq=False)
class Entries:
    """The columns of n entries.

    Attributes:
        ids: names, no two the same.
        texts: texts, None where an entry has none.
        metadata: a JSON value per entry.
        vectors: (n, e) float32, what is searched.
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
        """One of them."""
        tokens = None if self.tokens is None else self.tokens[row]
        return Entry(self.ids[row], self.texts[row], self.metadata[row], self.vectors[row], tokens)

    def find(self, names: Sequence[Id]) -> list[int]:
        """The row of each id of a list.

        Raises:
            IndexMismatchError: an id that is not here, or one given twice.
        """
        check_known(names, self.rows)
        return [self.rows[name] for name in names]

    def joined(self, other: Entries) -> Entries:
        """These entries and then the others.

        Raises:
            IndexMismatchError: an id is in both.
        """
        taken = [name for name in other.ids if name in self.rows]
        if taken:
            raise IndexMismatchError(
                f"the index already has an entry {_listed(taken)}, of {len(other)} given ids; to replace entries use "
                "update. Nothing was changed"
            )
        if not len(self) or not len(other):
            return self if len(self) else other
        return Entries(
            self.ids + other.ids,
            self.texts + other.texts,
            self.metadata + other.metadata,
            torch.cat([self.vectors, other.vectors]),
            None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
        )

    def kept(self, rows: list[int]) -> Entries:
        """Some of these entries."""
        return Entries(
            tuple(self.ids[row] for row in rows),
            tuple(self.texts[row] for row in rows),
            tuple(self.metadata[row] for row in rows),
            self.vectors[rows],
            None if self.tokens is None else tuple(self.tokens[row] for row in rows),
        )

    def replaced(self, rows: list[int], **columns: Any) -> Entries:
        """These entries with other values in some rows of some columns."""
        new: dict[str, Any] = {name: getattr(self, name) for name in ("texts", "metadata", "vectors", "tokens")}
        for name, values in columns.items():
            if name == "vectors":
                new[name] = self.vectors.clone()
                new[name][rows] = values
            else:
                column = list(new[name])
                for row, value in zip(rows, values, strict=True):
                    column[row] = value
                new[name] = tuple(column)
        return Entries(self.ids, **new)

    def to(self, device: torch.device) -> Entries:
        """The same entries with their vectors and tokens on a device."""
        tokens = None if self.tokens is None else tuple(part.to(device) for part in self.tokens)
        return Entries(self.ids, self.texts, self.metadata, self.vectors.to(device), tokens)

    def allowed(self, chosen: Filter | None) -> Tensor | None:
        """Which entries (n,) a filter lets through; None for all.

        Raises:
            ConfigError: the filter is neither a dict nor a function.
        """
        if chosen is None:
            return None
        if isinstance(chosen, Mapping):
            found = [_has(metadata, chosen) for metadata in self.metadata]
        elif callable(chosen):
            found = [bool(chosen(metadata)) for metadata in self.metadata]
        else:
            raise ConfigError(
                f"filter must be a dict of metadata that must be equal, or a function of an entry's metadata that says "
                f"True or False; got {type(chosen).__name__}"
            )
        return torch.tensor(found, dtype=torch.bool, device=self.vectors.device)


def as_id_list(ids: Iterable[Id]) -> list[Id]:
    """Ids of entries that are there, as a list.

    Raises:
        ConfigError: one id, and no list of them.
    """
    if isinstance(ids, (str, int)):
        raise ConfigError(f"ids must be a list, got {ids!r}; for one entry give [{ids!r}]")
    return list(ids)


def check_known(names: Sequence[Id], known: Collection[Id]) -> None:
    """Refuse ids of entries that are not there.

    Raises:
        IndexMismatchError: an id that is not known, or one given twice.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise IndexMismatchError(
            f"the index has no entry {_listed(unknown)}, of {len(names)} given ids (it has {len(known)} entries, "
            f"{_listed(list(known))}); nothing was changed"
        )
    _refuse_twice(names)


def check_ids(ids: Iterable[Any], count: int) -> tuple[Id, ...]:
    """Ids as a tuple: text or ints, one per entry, no two the same.

    Raises:
        IndexMismatchError: anything else.
    """
    found = tuple(_listable("ids", ids))
    for row, name in enumerate(found):
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise IndexMismatchError(f"ids are text or ints, got {name!r:.80} ({type(name).__name__}) at row {row}")
    if len(found) != count:
        raise IndexMismatchError(f"each entry needs one id: got {len(found)} ids for {count} entries")
    _refuse_twice(found)
    return found


def check_texts(texts: Iterable[Any], count: int | None = None, *, optional: bool = False) -> tuple[str | None, ...]:
    """Texts as a tuple, of `count` entries.

    Args:
        texts: the texts.
        count: how many there must be.
        optional: whether None stands for an entry without a text.

    Raises:
        TextError: something else, or another number of them.
    """
    found = tuple(_listable("texts", texts))
    for row, text in enumerate(found):
        if not isinstance(text, str) and not (optional and text is None):
            raise TextError(f"text {row} must be a string, got {text!r:.80} ({type(text).__name__}); leave the row out")
    if count is not None and len(found) != count:
        raise TextError(f"each entry needs one text: got {len(found)} texts for {count} entries")
    return found


def check_metadata(metadata: Iterable[Any], count: int) -> tuple[Any, ...]:
    """Metadata as a tuple of plain JSON values, copied, so that later changes by the caller do not reach the index.

    Raises:
        ConfigError: a value JSON cannot hold, or another number of them.
    """
    found = tuple(_listable("metadata", metadata))
    if len(found) != count:
        raise ConfigError(f"each entry needs one value of metadata: got {len(found)} for {count} entries")
    try:
        return tuple(json.loads(dump_json("metadata", found, MAX_METADATA)))
    except ConfigError:
        for row, value in enumerate(found):
            dump_json(f"metadata {row}", value, MAX_METADATA)  # says which
        raise


def check_tokens(tokens: Any, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """The real slots (m, e') of each row of a memory.

    Raises:
        ShapeError: no memory, or another number of rows.
    """
    if not isinstance(tokens, Memory):
        raise ShapeError(f"tokens must be a Memory with one row per entry, got {type(tokens).__name__}")
    if tokens.batch != count:
        raise ShapeError(f"tokens must have one row per entry: got {tokens.batch} rows for {count} entries")
    tokens.check_finite()
    mask = tokens.mask
    rows = [tokens.tokens[i] if mask is None else tokens.tokens[i][mask[i]] for i in range(count)]
    return tuple(row.detach().to(device, copy=True) for row in rows)


def check_lines(entries: Entries) -> None:
    """Refuse ids and texts that no JSON line can hold (half a surrogate pair, say).

    Raises:
        TextError: naming the entry.
    """
    for row, line in enumerate(zip(entries.ids, entries.texts, strict=True)):
        try:
            "".join(str(part) for part in line if part is not None).encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"entry {row} has half a surrogate pair in its id or text, which no file can hold; read it with the "
                "right encoding, or repair it: text.encode('utf-8', 'replace').decode()"
            ) from error


def _has(metadata: Any, wanted: Mapping[str, Any]) -> bool:
    return isinstance(metadata, dict) and all(key in metadata and metadata[key] == wanted[key] for key in wanted)


def _listable(what: str, values: Iterable[Any]) -> Iterable[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{what} must be a list with one value per entry, got {type(values).__name__}")
    return values


def _refuse_twice(names: Sequence[Id]) -> None:
    if len(set(names)) != len(names):
        seen: set[Id] = set()
        twice = [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        raise IndexMismatchError(
            f"an id names one entry, and {_listed(twice)} is given more than once; nothing changed"
        )


def _listed(names: Sequence[Id]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
