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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmattn.errors import import_extra
from mmattn.retrieval.stores import register_store
from mmattn.retrieval.stores.database import DatabaseStore, Row, State
from mmattn.storage.files import lock_folder

if TYPE_CHECKING:
    import pyarrow

#: After so many changes their files are merged, and versions that nobody can still be reading are deleted.
_CHANGES, _AGE = 100, timedelta(minutes=10)
_READ = ["place", "id", "text", "metadata", "tokens", "vector"]
#: Length of queries: the engine computes 1 - product in float32, which loses products that are small beside 1.
_LENGTH = 2.0**60


@register_store("lancedb")
class LanceStore(DatabaseStore):
    """A table of LanceDB. A search compares every entry, in float32.

    Each change is one version of the table, and a search reads one version. Processes that change a table in a folder
    wait for each other; in an object store one process at a time may change a table, and any number may search it.

    Args:
        uri: of the database: a folder, an address such as "s3://bucket/path", or "memory://".
        table: its name.

    Raises:
        ConfigError: the table exists.
        MissingExtraError: lancedb is not installed.
    """

    schemes = ("lance",)

    def __init__(
        self, dim: int | None, metric: str, *, uri: str | os.PathLike[str] = "memory://", table: str = "mmattn"
    ) -> None:
        self.uri, self.name = os.fspath(uri), table
        self.place, self._lock = f"table {table!r} in {self.uri!r}", threading.RLock()
        self._is_folder = "://" not in self.uri
        self._library = import_extra("lancedb", "lance")
        self._depth = self._changes = 0
        super().__init__(dim, metric)

    @classmethod
    def settings_of(cls, address: str) -> dict[str, str]:
        """Return the settings in lance:FOLDER#table, or lance:s3://bucket/path#table."""
        uri, mark, table = address.removeprefix("lance:").partition("#")
        return {"uri": uri, "table": table} if mark else {"uri": uri}

    def _exists(self) -> bool:
        if self._is_folder and not os.path.isdir(self.uri):
            return False
        # Every search looks for what other processes have written.
        self._database = self._library.connect(self.uri, read_consistency_interval=timedelta(0))
        try:
            self._open()
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return False
        return True

    def _create(self) -> None:
        arrow = import_extra("pyarrow", "lance")
        vector, text = arrow.list_(arrow.float32(), self.dim), arrow.string()
        types = {"place": arrow.int64(), "id": text, "text": text, "metadata": text, "tokens": arrow.large_binary()}
        types |= {"vector": vector, "facts": arrow.list_(text)}
        types |= {"direction": vector} if self.metric == "cosine" else {}
        self._database.create_table(self.name, schema=arrow.schema(types))
        self._database.create_table(f"{self.name}_about", schema=arrow.schema({"about": text}))
        self._open()

    def _open(self) -> None:
        self.table = self._database.open_table(self.name)
        self._about_table = self._database.open_table(f"{self.name}_about")

    def __len__(self) -> int:
        return int(self.table.count_rows())

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
            if self._depth == 0 and self._is_folder:
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

    def _ids(self) -> list[str]:
        rows = self.table.search().select(["place", "id"]).to_arrow().sort_by("place")
        return rows["id"].to_pylist()

    def _delete(self, ids: list[str]) -> None:
        self.table.delete(f"id IN ({_quoted(ids)})")
        self._compact()

    def _read_state(self) -> State:
        rows = self._about_table.search().to_arrow().to_pylist()
        return json.loads(rows[0]["about"]) if rows else {}

    def _write_state(self, state: State) -> None:
        self._about_table.add([{"about": json.dumps(state)}], mode="overwrite")

    def _fetch(self, ids: list[str] | None) -> list[Row]:
        request = self.table.search() if ids is None else self.table.search().where(f"id IN ({_quoted(ids)})")
        return [row for _, row in _rows(request.select(_READ).to_arrow())]

    def _insert(self, rows: list[Row]) -> None:
        self.table.add(self._as_table(rows))
        self._compact()

    def _replace(self, rows: list[Row]) -> None:
        self.table.merge_insert("id").when_matched_update_all().execute(self._as_table(rows))
        self._compact()

    def _as_table(self, rows: list[Row]) -> pyarrow.Table:
        vectors = ({"vector": row.vector.numpy(), "direction": row.direction.numpy()} for row in rows)
        lines = [row._asdict() | columns for row, columns in zip(rows, vectors, strict=True)]
        return import_extra("pyarrow", "lance").Table.from_pylist(lines, schema=self.table.schema)

    def _nearest(self, queries: Tensor, count: int, facts: list[list[str]]) -> list[list[Row]]:
        is_l2, column = self.metric == "l2", "direction" if self.metric == "cosine" else "vector"
        scaled = list((queries if is_l2 else queries * _LENGTH).numpy())
        request = self.table.search(scaled, vector_column_name=column).select([*_READ, "_distance"])
        request = request.distance_type("l2" if is_l2 else "dot").limit(count)
        if facts:
            conditions = (f"array_has_any(facts, [{_quoted(part)}])" for part in facts)
            request = request.where(" AND ".join(conditions), prefilter=True)
        near: list[list[Row]] = [[] for _ in queries]
        for number, row in _rows(request.to_arrow()):
            near[number].append(row)
        return near


def _rows(table: pyarrow.Table) -> Iterator[tuple[int, Row]]:
    """Yield the number of the query that found a row, 0 where there was one, and the row."""
    for line in table.to_pylist():
        number = line.get("query_index", 0)
        vector = torch.tensor(line["vector"], dtype=torch.float32)
        yield number, Row(**{name: line[name] for name in _READ} | {"vector": vector})


def _quoted(values: Sequence[str]) -> str:
    """Return texts as SQL literals."""
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)
