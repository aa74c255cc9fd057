"""The base class of stores in a database: entries as rows, filters as digests, and one JSON object about the table."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError
from mmattn.retrieval.entries import MAX_METADATA, Entries, Filter, Id
from mmattn.retrieval.scoring import METRICS
from mmattn.retrieval.stores.base import Candidates
from mmattn.retrieval.stores.entry_files import write_entries
from mmattn.retrieval.stores.exact import InMemoryStore
from mmattn.storage.json_files import dump_json

FORMAT_VERSION = 1


class Row(NamedTuple):
    """One entry in a database; `place` counts in the order of adding, and `tokens` is a safetensors file."""

    place: int
    id: Id
    text: str | None
    metadata: Any
    vector: Tensor
    tokens: bytes | None


class DatabaseStore(ABC):
    """A store whose entries outlive the process: `Index.open` finds it again by an address.

    A subclass reads and writes rows, and has a class method `connect(**settings)` that returns a store over existing
    entries, or raises IndexFileError with a message that contains no password. Searches compare in float32 where the
    entries are, and so return some more candidates than `top_k`. Filters compare digests of metadata, since a
    database's own comparison rounds ints or tells 1 from 1.0.

    Attributes:
        schemes: what addresses begin with before ":", such as ("postgresql",).
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 0.99
    holds_tokens: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]]
    dim: int
    metric: str

    @abstractmethod
    def __init__(self, dim: int, metric: str, **settings: Any) -> None: ...

    @classmethod
    @abstractmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """Return the settings in an address SCHEME:…, for a new store and `connect`."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Any]:
        """Return the context of one change: no other process changes entries meanwhile; reentrant."""

    @abstractmethod
    def drop(self) -> None:
        """Delete the entries and what holds them, and close."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def ids(self) -> tuple[Id, ...]: ...

    @abstractmethod
    def delete(self, ids: Sequence[Id]) -> None: ...

    @abstractmethod
    def _read_state(self) -> dict[str, Any]:
        """Return the JSON object that `_write_state` wrote, {} where there is none."""

    @abstractmethod
    def _write_state(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def _fetch(self, ids: Sequence[Id] | None) -> list[Row]:
        """Return the rows of these ids, or all rows."""

    @abstractmethod
    def _insert(self, rows: list[Row]) -> None: ...

    @abstractmethod
    def _replace(self, rows: list[Row]) -> None: ...

    @abstractmethod
    def _nearest(self, queries: Tensor, count: int, facts: list[str]) -> list[list[Row]]:
        """Return the `count` nearest rows of each query (b, e) among the rows that have all of these facts."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return no settings: a saved copy is opened in this process."""
        return {}

    @property
    def about(self) -> dict[str, Any]:
        """Return what the index wrote, as the database says now."""
        about: dict[str, Any] = self._read_state()["about"]
        return about

    @about.setter
    def about(self, about: dict[str, Any]) -> None:
        with self.writing():
            self._write_state({**self._read_state(), "about": about})

    def get(self, ids: Sequence[Id]) -> Entries:
        """Return the entries with these ids."""
        return as_entries(self._fetch(ids) if len(ids) else [], self.dim)

    def add(self, entries: Entries) -> None:
        """Append entries."""
        with self.writing():
            state = self._read_state()
            start, end = state["next_place"], state["next_place"] + len(entries)
            # Killed after this line, the store has a gap in its places, and nothing else.
            self._write_state({**state, "next_place": end})
            self._insert(_as_rows(entries, range(start, end)))

    def update(self, entries: Entries) -> None:
        """Replace entries."""
        with self.writing():
            places = {row.id: row.place for row in self._fetch(entries.ids)}
            self._replace(_as_rows(entries, [places[name] for name in entries.ids]))

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """Return what the database finds nearest."""
        facts = _facts_of_filter(filter)
        near = self._nearest(queries, 2 * top_k + 32, facts) if len(queries) else []
        entries = as_entries([row for rows in near for row in rows], self.dim)
        table = torch.full((len(queries), max(map(len, near), default=0)), -1)
        for line, rows in zip(table, near, strict=True):
            line[: len(rows)] = torch.tensor([entries.rows[row.id] for row in rows], dtype=torch.long)
        return Candidates(entries, table)

    def save(self, folder: str) -> None:
        """Write a copy of all entries."""
        write_entries(folder, as_entries(self._fetch(None), self.dim))

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> InMemoryStore:
        """Return the saved copy in the memory of this process."""
        return InMemoryStore.open(folder, dim, metric, mapped=mapped)

    def _begin(self, dim: int, metric: str, **more: Any) -> None:
        """Describe a new store."""
        self.dim, self.metric = dim, metric
        state = {"format_version": FORMAT_VERSION, "dim": dim, "metric": metric, "next_place": 0, "about": {}}
        self._write_state({**state, **more})

    def _resume(self, where: str) -> dict[str, Any]:
        """Return the description of an existing store, checked."""
        state = self._read_state()
        ints = [state.get(name) for name in ("format_version", "dim", "next_place")]
        if not (
            all(type(value) is int and value >= 0 for value in ints)
            and ints[0] == FORMAT_VERSION
            and state.get("metric") in METRICS
            and isinstance(state.get("about"), dict)
        ):
            raise IndexFileError(
                f"{where} is not of this version of mmattn, which reads format {FORMAT_VERSION}: it is described by "
                f"{state!r:.200}. Build one under another name"
            )
        self.dim, self.metric = state["dim"], state["metric"]
        return state


def facts_of(metadata: Any) -> list[str]:
    """Return one digest per key and value of metadata, equal exactly where Python says that these are equal."""
    return [_fact(key, value) for key, value in metadata.items()] if isinstance(metadata, dict) else []


def as_entries(rows: Sequence[Row], dim: int) -> Entries:
    """Return rows as entries, each once, in the order of adding."""
    rows = sorted({row.place: row for row in rows}.values(), key=lambda row: row.place)
    vectors = torch.stack([row.vector for row in rows]) if rows else torch.empty(0, dim)
    tokens = tuple(load(row.tokens)["tokens"] for row in rows if row.tokens is not None)
    return Entries(
        tuple(row.id for row in rows),
        tuple(row.text for row in rows),
        tuple(row.metadata for row in rows),
        vectors,
        tokens if rows and len(tokens) == len(rows) else None,
    )


def _as_rows(entries: Entries, places: Sequence[int]) -> list[Row]:
    tokens = entries.tokens or [None] * len(entries)
    packed = [None if part is None else save({"tokens": part.contiguous()}) for part in tokens]
    columns = zip(places, entries.ids, entries.texts, entries.metadata, entries.vectors, packed, strict=True)
    return [Row(*values) for values in columns]


def _facts_of_filter(filter: Filter | None) -> list[str]:
    if filter is None:
        return []
    if not isinstance(filter, Mapping):
        raise ConfigError(
            f"filter must be a dict of metadata that must be equal, got {type(filter).__name__}: a database cannot "
            "call a function; use a store in memory, such as 'exact'"
        )
    return facts_of(dict(filter))


def _fact(key: str, value: Any) -> str:
    return hashlib.sha256(dump_json("filter", [key, _normal(value)], MAX_METADATA)).hexdigest()[:32]


def _normal(value: Any) -> Any:
    """Return the same JSON for values that Python says are equal: True, 1 and 1.0, or dicts in any order."""
    if isinstance(value, dict):
        return {key: _normal(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_normal(one) for one in value]
    return int(value) if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()) else value
