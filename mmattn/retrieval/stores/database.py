"""The base class of stores in a database: entries as rows, filters as digests, and one JSON object about the table."""

from __future__ import annotations

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, Field, NonNegativeInt
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import Self

from mmattn.errors import AdapterFileError, ConfigError, IndexFileError
from mmattn.retrieval.entries import MAX_METADATA, Entries, Filter, Id, check_keys, values_of, write_entries
from mmattn.retrieval.scoring import directions
from mmattn.retrieval.stores import About, Candidates
from mmattn.retrieval.stores.exact import InMemoryStore
from mmattn.storage.json_files import dump_json, validated

#: Entries whose keys a message lists.
_SAMPLE = 64
#: The JSON object about a table, as `_State` describes it.
State = dict[str, Any]


class _State(BaseModel, extra="allow"):
    format_version: Annotated[int, Field(ge=1, le=1)]
    dim: NonNegativeInt
    metric: Literal["cosine", "ip", "l2"]
    next_place: NonNegativeInt
    indexed: bool | None  # None where there will be no index
    about: dict[str, Any]


class Row(NamedTuple):
    """One entry in a database.

    `place` counts in the order of adding, `id` and `metadata` are JSON, `tokens` is a safetensors file, and `facts` are
    digests of the metadata, which are written and not read.
    """

    place: int
    id: str
    text: str | None
    metadata: str
    tokens: bytes | None
    vector: Tensor
    facts: Sequence[str] = ()

    @property
    def direction(self) -> Tensor:
        """The vector at length 1."""
        return directions(self.vector.double()).float()


class DatabaseStore(ABC):
    """A store whose entries outlive the process: `Index.open` finds it again by an address.

    A subclass reads and writes rows. Its constructor sets `place` and `_lock`, and ends with the constructor of this
    class, which makes a table, or opens it where `dim` is None; no message contains a password. Searches compare in
    float32 where the entries are, and so return more candidates than `top_k`. Filters compare digests of metadata,
    since a database's own comparison rounds ints or tells 1 from 1.0. The methods are those of `VectorStore`.

    Attributes:
        schemes: what addresses begin with before ":", such as ("postgresql",).
        place: the table in messages, such as "table 'facts'".
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 0.99
    holds_tokens: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]]
    #: None: a saved copy is opened in this process.
    settings: ClassVar[Mapping[str, object]] = {}
    dim: int
    metric: str
    place: str
    _lock: threading.RLock

    def __init__(self, dim: int | None, metric: str, indexed: bool | None = None) -> None:
        try:
            if dim is None:
                self.dim, self.metric = self._read_table()
                return
            self.dim, self.metric = dim, metric
            with self.writing():
                if self._exists():
                    raise ConfigError(
                        f"there is a {self.place} already: open it with Index.open, or build under another name"
                    )
                self._create()
                state = {"format_version": 1, "dim": dim, "metric": metric, "next_place": 0, "indexed": indexed}
                self._write_state({**state, "about": {}})
        except BaseException:
            self.close()
            raise

    def _read_table(self) -> tuple[int, str]:
        """Return width and metric of the existing table."""
        if not self._exists():
            raise IndexFileError(f"there is no {self.place} that mmattn made: make one with Index.build")
        state = self._read_state()
        try:
            sound: _State = validated(self.place, _State, state)
        except AdapterFileError as error:
            raise IndexFileError(
                f"{self.place} is not of this version of mmattn, which reads format 1: it is described by "
                f"{state!r:.200}. Build an index under another name"
            ) from error
        return sound.dim, sound.metric

    @classmethod
    @abstractmethod
    def settings_of(cls, address: str) -> dict[str, str]:
        """Return the settings in an address SCHEME:…, for a new store and `connect`."""

    @classmethod
    def connect(cls, **settings: Any) -> Self:
        """Return a store over existing entries."""
        return cls(None, "", **settings)

    @abstractmethod
    def _exists(self) -> bool: ...

    @abstractmethod
    def _create(self) -> None: ...

    def writing(self) -> AbstractContextManager[object]:
        """Return the context of one change: no other thread or process changes entries meanwhile; reentrant."""
        return self._lock

    @abstractmethod
    def drop(self) -> None:
        """Delete the entries and what holds them, and close."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _ids(self) -> list[str]:
        """Return all ids as JSON, in the order of adding."""

    @abstractmethod
    def _delete(self, ids: list[str]) -> None: ...

    @abstractmethod
    def _read_state(self) -> State:
        """Return the JSON object that `_write_state` wrote, {} where there is none."""

    @abstractmethod
    def _write_state(self, state: State) -> None: ...

    @abstractmethod
    def _fetch(self, ids: list[str] | None) -> list[Row]:
        """Return the rows of these ids, or all rows."""

    @abstractmethod
    def _insert(self, rows: list[Row]) -> None: ...

    def _replace(self, rows: list[Row]) -> None:
        self._delete([row.id for row in rows])
        self._insert(rows)

    @abstractmethod
    def _nearest(self, queries: Tensor, count: int, facts: list[list[str]]) -> list[list[Row]]:
        """Return the `count` nearest rows of each query (b, e) among the rows that have one fact of each list.

        Queries of inner products and cosines are at length 1.
        """

    @property
    def about(self) -> About:
        """Return what the index wrote, as the database says now."""
        with self._lock:
            about: About = self._read_state()["about"]
            return about

    @about.setter
    def about(self, about: About) -> None:
        with self.writing():
            self._write_state({**self._read_state(), "about": about})

    @property
    def ids(self) -> tuple[Id, ...]:
        with self._lock:
            return tuple(map(json.loads, self._ids()))

    def get(self, ids: Sequence[Id]) -> Entries:
        with self._lock:
            return as_entries(self._fetch([json.dumps(name) for name in ids]) if len(ids) else [], self.dim)

    def add(self, entries: Entries) -> None:
        with self.writing():
            state = self._read_state()
            start, end = state["next_place"], state["next_place"] + len(entries)
            # Killed after this line, the store has a gap in its places, and nothing else.
            self._write_state({**state, "next_place": end})
            self._insert(_as_rows(entries, range(start, end)))

    def update(self, entries: Entries) -> None:
        names = [json.dumps(name) for name in entries.ids]
        with self.writing():
            places = {row.id: row.place for row in self._fetch(names)}
            self._replace(_as_rows(entries, [places[name] for name in names]))

    def delete(self, ids: Sequence[Id]) -> None:
        with self.writing():
            self._delete([json.dumps(name) for name in ids])

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        facts = _facts_of_filter(filter)
        # Directions, since lengths could overflow float32 there, and do not change the order of products.
        compared = queries if self.metric == "l2" else directions(queries.double()).float()
        with self._lock:
            near = self._nearest(compared, 2 * top_k + 32, facts) if len(queries) else []
            if isinstance(filter, Mapping) and near and not any(near):
                self._check_keys(filter, compared[:1])
        entries = as_entries([row for rows in near for row in rows], self.dim)
        table = torch.full((len(queries), max(map(len, near), default=0)), -1)
        for line, rows in zip(table, near, strict=True):
            line[: len(rows)] = torch.tensor([entries.rows[json.loads(row.id)] for row in rows], dtype=torch.long)
        return Candidates(entries, table)

    def _check_keys(self, filter: Mapping[str, object], query: Tensor) -> None:
        """Raise ConfigError for a key of a filter that no entry has, with the keys of entries near a query."""
        (near,) = self._nearest(query, _SAMPLE, [])
        columns = [metadata for row in near if isinstance(metadata := json.loads(row.metadata), dict)]
        known = {key for metadata in columns for key in metadata}
        known |= {key for key in filter.keys() - known if any(self._nearest(query, 1, [[_digest(key)]]))}
        if near:
            check_keys(filter, known)

    def save(self, folder: str) -> None:
        with self._lock:
            write_entries(folder, as_entries(self._fetch(None), self.dim))

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: object) -> InMemoryStore:
        return InMemoryStore.open(folder, dim, metric, mapped=mapped)


def as_entries(rows: Sequence[Row], dim: int) -> Entries:
    """Return rows as entries, each once, in the order of adding."""
    rows = sorted({row.place: row for row in rows}.values(), key=lambda row: row.place)
    tokens = tuple(load(row.tokens)["tokens"] for row in rows if row.tokens is not None)
    return Entries(
        tuple(json.loads(row.id) for row in rows),
        tuple(row.text for row in rows),
        tuple(json.loads(row.metadata) for row in rows),
        torch.stack([row.vector for row in rows]) if rows else torch.empty(0, dim),
        tokens if rows and len(tokens) == len(rows) else None,
    )


def _as_rows(entries: Entries, places: Sequence[int]) -> list[Row]:
    tokens = entries.tokens or [None] * len(entries)
    packed = [None if part is None else save({"tokens": part.contiguous()}) for part in tokens]
    ids, metadata = ([json.dumps(value) for value in column] for column in (entries.ids, entries.metadata))
    facts = [_facts(value) for value in entries.metadata]
    columns = zip(places, ids, entries.texts, metadata, packed, entries.vectors, facts, strict=True)
    return [Row(*values) for values in columns]


def _facts(metadata: object) -> list[str]:
    """Return digests of the keys of metadata, and of each value under its key."""
    if not isinstance(metadata, Mapping):
        return []
    pairs = [[key, _normal(part)] for key, value in metadata.items() for part in values_of(value)]
    return list(map(_digest, [*metadata, *pairs]))


def _facts_of_filter(filter: Filter | None) -> list[list[str]]:
    """Return for each key of a filter the digests; an entry must have one of them."""
    if filter is not None and not isinstance(filter, Mapping):
        raise ConfigError(
            f"filter must be a dict of metadata that must be equal, got {type(filter).__name__}: a database cannot "
            "call a function; use a store in memory, such as 'exact'"
        )
    # No entry has the digest "", so that an empty list allows none.
    return [
        [_digest([key, _normal(part)]) for part in values_of(wanted)] or [""] for key, wanted in (filter or {}).items()
    ]


def _digest(fact: object) -> str:
    """Return a digest that is equal exactly where Python says that the facts are."""
    return hashlib.sha256(dump_json("filter", fact, MAX_METADATA)).hexdigest()[:32]


def _normal(value: object) -> object:
    """Return the same JSON for values that Python says are equal: True, 1 and 1.0, or dicts in any order."""
    if isinstance(value, dict):
        return {key: _normal(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_normal(part) for part in value]
    return int(value) if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()) else value
