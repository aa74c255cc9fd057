"""A store in a table of LanceDB: in memory, in a folder, or in an object store.

NAME holds a row per entry, with ids and metadata as JSON, facts (digests of metadata), and under the cosine the vector
at length 1 as "direction", which is searched. NAME_about holds one row of JSON about the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.entries import Id
from mmattn.retrieval.scoring import directions
from mmattn.retrieval.stores.base import register_store
from mmattn.retrieval.stores.database import DatabaseStore, Row, facts_of
from mmattn.storage.files import lock_folder

if TYPE_CHECKING:
    import pyarrow

_MEMORY = "memory://"
#: After so many changes their files are merged, and versions that nobody can still be reading are deleted.
_CHANGES, _AGE = 100, timedelta(minutes=10)
_READ = ["place", "id", "text", "metadata", "vector", "tokens"]
#: Length of queries: the engine computes 1 - product in float32, which loses products that are small beside 1.
_LENGTH = 2.0**60


@register_store("lancedb")
class LanceStore(DatabaseStore):
    """A table of LanceDB. A search compares every entry, in float32.

    Each change is one version of the table, and a search reads one version. Processes that change a table in a folder
    wait for each other; in an object store one process at a time may change a table, and any number may search it.

    Args:
        dim: width e of the vectors.
        metric: "cosine", "ip" or "l2".
        uri: of the database: a folder, an address such as "s3://bucket/path", or "memory://".
        table: its name.

    Raises:
        ConfigError: the table exists.
        MissingExtraError: lancedb is not installed.
    """

    schemes = ("lance",)

    def __init__(self, dim: int, metric: str, *, uri: str | os.PathLike[str] = _MEMORY, table: str = "mmattn") -> None:
        self._use(uri, table)
        with self.writing():
            for name, schema in ((table, _schema(dim, metric)), (f"{table}_about", _about({}).schema)):
                try:
                    self._database.create_table(name, schema=schema)
                except ValueError as error:
                    if "already exists" not in str(error):
                        raise
                    raise ConfigError(
                        f"there is a table {name!r} already: open it with Index.open('lance:{self.uri}#{table}'), or "
                        "give another name in table="
                    ) from error
            self._open()
            self._begin(dim, metric)

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """Return the settings in lance:FOLDER#table, or lance:s3://bucket/path#table."""
        uri, mark, table = address.removeprefix("lance:").partition("#")
        return {"uri": uri, "table": table} if mark else {"uri": uri}

    @classmethod
    def connect(cls, *, uri: str | os.PathLike[str], table: str = "mmattn") -> LanceStore:
        """Return a store over an existing table."""
        store = cls.__new__(cls)
        if "://" not in os.fspath(uri) and not os.path.isdir(uri):
            raise IndexFileError(f"there is no folder {os.fspath(uri)!r}: make one with Index.build(…, store=…)")
        store._use(uri, table)
        try:
            store._open()
        except ValueError as error:
            if "not found" not in str(error):
                raise
            raise IndexFileError(
                f"there is no table {table!r} that mmattn made in {store.uri!r}; its tables: "
                f"{', '.join(store._database.list_tables().tables[:8]) or 'none'}. Make one with Index.build"
            ) from error
        store._resume(f"table {table!r}")
        return store

    def _use(self, uri: str | os.PathLike[str], table: str) -> None:
        self.uri, self.name = os.fspath(uri), table
        # Every search looks for what other processes have written.
        self._database = import_extra("lancedb", "lance").connect(self.uri, read_consistency_interval=timedelta(0))
        self._lock = threading.RLock()
        self._depth = self._changes = 0

    def _open(self) -> None:
        self.table = self._database.open_table(self.name)
        self._about_table = self._database.open_table(f"{self.name}_about")

    @property
    def ids(self) -> tuple[Id, ...]:
        """Return all ids, in the order of adding."""
        rows = self.table.search().select(["place", "id"]).to_arrow().sort_by("place")
        return tuple(map(json.loads, rows["id"].to_pylist()))

    def __len__(self) -> int:
        return int(self.table.count_rows())

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self.writing():
            self.table.delete(_where_id(ids))
            self._compact()

    def drop(self) -> None:
        """Delete the table."""
        for name in (self.name, f"{self.name}_about"):
            self._database.drop_table(name, ignore_missing=True)

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder against other threads and processes; each verb is one version, all or none."""
        with self._lock, contextlib.ExitStack() as stack:
            if self._depth == 0 and "://" not in self.uri:
                os.makedirs(self.uri, exist_ok=True)
                stack.enter_context(lock_folder(self.uri))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def _compact(self) -> None:
        self._changes += 1
        if self._changes % _CHANGES == 0:
            self.table.optimize(cleanup_older_than=_AGE)
            self._about_table.optimize(cleanup_older_than=timedelta(minutes=1))

    def _read_state(self) -> dict[str, Any]:
        rows = self._about_table.search().to_arrow().to_pylist()
        state: dict[str, Any] = json.loads(rows[0]["about"]) if rows else {}
        return state

    def _write_state(self, state: dict[str, Any]) -> None:
        self._about_table.add(_about(state), mode="overwrite")

    def _fetch(self, ids: Sequence[Id] | None) -> list[Row]:
        request = self.table.search() if ids is None else self.table.search().where(_where_id(ids))
        return _rows(request.select(_READ).to_arrow())

    def _insert(self, rows: list[Row]) -> None:
        self.table.add(_as_table(rows, self.table.schema))
        self._compact()

    def _replace(self, rows: list[Row]) -> None:
        self.table.merge_insert("id").when_matched_update_all().execute(_as_table(rows, self.table.schema))
        self._compact()

    def _nearest(self, queries: Tensor, count: int, facts: list[str]) -> list[list[Row]]:
        scaled = queries if self.metric == "l2" else (directions(queries.double()) * _LENGTH).float()
        column = "direction" if self.metric == "cosine" else "vector"
        request = self.table.search(list(scaled.numpy()), vector_column_name=column).select([*_READ, "_distance"])
        request = request.distance_type("l2" if self.metric == "l2" else "dot").limit(count)
        if facts:
            request = request.where(f"array_has_all(facts, [{_quoted(facts)}])", prefilter=True)
        table = request.to_arrow()
        numbers = table["query_index"].to_pylist() if "query_index" in table.column_names else [0] * len(table)
        near: list[list[Row]] = [[] for _ in queries]
        for number, row in zip(numbers, _rows(table), strict=True):
            near[number].append(row)
        return near


def _schema(dim: int, metric: str) -> pyarrow.Schema:
    arrow = import_extra("pyarrow", "lance")
    vector, text = arrow.list_(arrow.float32(), dim), arrow.string()
    types = {"place": arrow.int64(), "id": text, "text": text, "metadata": text}
    types |= {"facts": arrow.list_(text), "vector": vector, "tokens": arrow.large_binary()}
    return arrow.schema(types | ({"direction": vector} if metric == "cosine" else {}))


def _about(state: dict[str, Any]) -> pyarrow.Table:
    return import_extra("pyarrow", "lance").table({"about": [json.dumps(state)]})


def _as_table(rows: list[Row], schema: pyarrow.Schema) -> pyarrow.Table:
    lines = [
        {
            "place": row.place,
            "id": json.dumps(row.id),
            "text": row.text,
            "metadata": json.dumps(row.metadata),
            "facts": facts_of(row.metadata),
            "vector": row.vector.numpy(),
            "direction": directions(row.vector.double()).float().numpy(),
            "tokens": row.tokens,
        }
        for row in rows
    ]
    return import_extra("pyarrow", "lance").Table.from_pylist(lines, schema=schema)


def _rows(table: pyarrow.Table) -> list[Row]:
    flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    vectors = torch.from_numpy(flat.copy()).view(len(table), -1) if len(table) else torch.empty(0, 0)
    columns = [table[name].to_pylist() for name in ("place", "id", "text", "metadata", "tokens")]
    return [
        Row(place, json.loads(name), text, json.loads(metadata), vector, tokens)
        for place, name, text, metadata, tokens, vector in zip(*columns, vectors, strict=True)
    ]


def _where_id(ids: Sequence[Id]) -> str:
    return f"id IN ({_quoted([json.dumps(name) for name in ids])})"


def _quoted(values: Sequence[str]) -> str:
    """Return texts as SQL literals."""
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)
