"""A store whose entries are in a table of PostgreSQL, found with pgvector."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError
from mmattn.retrieval.entries import Entries, Filter, Id
from mmattn.retrieval.scoring import directions
from mmattn.retrieval.stores.base import Candidates
from mmattn.retrieval.stores.entry_files import read_copy, write_entries
from mmattn.retrieval.stores.pgvector_table import Table, as_entries, as_rows, copy_rows, psycopg
from mmattn.retrieval.stores.registry import register_store
from mmattn.retrieval.stores.store_state import key_of, wanted_facts

if TYPE_CHECKING:
    from psycopg import Connection

#: Fewer entries than this are compared one by one: no index is built, or, under a filter, used.
_FEW_IN_ALL, _FEW_ALLOWED = 1000, 10_000
#: pgvector's own limits: of the width that its indexes take, and of what a scan of a graph collects at once.
_WIDEST, _MOST = 2000, 1000
_OPERATORS = {"cosine": "<#>", "ip": "<#>", "l2": "<->"}
_INDEXES = ("hnsw", "ivfflat", None)
_READ = "id, text, metadata, vector_send(vector), tokens"
_TABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")


@register_store("pgvector")
class PgvectorStore:
    """A table of PostgreSQL, which this makes and `connect` finds again.

    Each change is one transaction; processes that change the same table wait for each other, and a search sees the
    table as it was at one moment. Below 1,000 entries, and where a filter leaves at most 10,000, every entry is
    compared; otherwise an index of pgvector is scanned, on and on until enough is found that the filter allows.

    Args:
        dim: width e of the vectors.
        metric: how they are compared.
        dsn: the database, as libpq names it: "postgresql://user@host/database", "host=… dbname=…", or "" for what the
            environment says (PGHOST, PGDATABASE, PGPASSWORD, …).
        table: its name, or SCHEMA.NAME; None is a table that ends with this store.
        index: "hnsw", "ivfflat" (quicker to build, and built anew when the table has grown), or None: every entry is
            compared.

    Raises:
        ConfigError: there is such a table; no pgvector of 0.8 or later; another index, or one of vectors wider than
            2,000.
        IndexFileError: no server answers.
        MissingExtraError: psycopg is not installed.
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 0.99
    holds_tokens: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("postgresql", "postgres")

    def __init__(
        self, dim: int, metric: str, *, dsn: str = "", table: str | None = "mmattn", index: str | None = "hnsw"
    ) -> None:
        if index not in _INDEXES:
            raise ConfigError(f"index must be one of {', '.join(map(repr, _INDEXES))}; got {index!r}")
        if index and dim > _WIDEST:
            raise ConfigError(
                f"indexes of pgvector take vectors up to {_WIDEST} wide, got {dim}: give index=None, which compares all"
            )
        self._use(dsn, table)
        self.dim, self.metric, self.index = dim, metric, index
        try:
            with self._connection() as connection, connection.transaction():
                self._table.create(connection, dim, metric, index)
        except BaseException:
            self.close()
            raise

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """The settings that an address names: postgresql://user@host/database#table.

        Args:
            address: as libpq takes it, and the table after "#"; without one it is "mmattn".
        """
        dsn, mark, table = address.rpartition("#")
        return {"dsn": dsn, "table": table} if mark and _TABLE.fullmatch(table) else {"dsn": address}

    @classmethod
    def connect(cls, *, dsn: str = "", table: str = "mmattn") -> PgvectorStore:
        """A store over a table that is there.

        Args:
            dsn: as for a new one.
            table: its name.

        Raises:
            IndexFileError: no server answers, there is no such table, or it was made by something else or by another
                version.
        """
        store = cls.__new__(cls)
        store._use(dsn, table)
        try:
            with store._connection() as connection:
                store.dim, store.metric, store.index = store._table.describe(connection)
        except BaseException:
            store.close()
            raise
        return store

    def _use(self, dsn: str, table: str | None) -> None:
        self._table = Table(table)
        self._dsn = _checked(dsn)
        self._free: deque[Connection[Any]] = deque()
        weakref.finalize(self, _close_all, self._free)
        # Tables that end with their connection have one, and threads wait for it.
        self._one: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if self._table.temporary else contextlib.nullcontext()
        )
        self._own = threading.local()

    @property
    def settings(self) -> dict[str, Any]:
        """The database without its password, and the index: where a copy that was saved is opened."""
        info = psycopg().conninfo
        kept = {name: value for name, value in info.conninfo_to_dict(self._dsn).items() if "password" not in name}
        return {"dsn": info.make_conninfo(**kept), "index": self.index}

    @property
    def about(self) -> dict[str, Any]:
        """The encoder and the next id, as the table says now."""
        encoder, next_id = self._row("SELECT encoder, next_id FROM {about}")
        return {"encoder": encoder, "next_id": int(next_id)}

    @about.setter
    def about(self, about: dict[str, Any]) -> None:
        with self.writing() as connection:
            values = [about.get("encoder"), about.get("next_id", 0)]
            connection.execute(self._table.sql("UPDATE {about} SET encoder = %s, next_id = %s"), values)

    @property
    def ids(self) -> tuple[Id, ...]:
        """All ids, in the order in which the entries were added; every one is fetched."""
        return tuple(name for (name,) in self._rows("SELECT id FROM {table} ORDER BY place"))

    def __len__(self) -> int:
        return int(self._row("SELECT count(*) FROM {table}")[0])

    def get(self, ids: Sequence[Id]) -> Entries:
        """The entries of those of these ids that are here."""
        where = f"SELECT {_READ} FROM {{table}} WHERE key = ANY (%s::uuid[]) ORDER BY place"
        return as_entries(self._rows(where, [[key_of(name) for name in ids]]), self.dim)

    def one(self) -> Entries:
        """One entry, or none."""
        return as_entries(self._rows(f"SELECT {_READ} FROM {{table}} LIMIT 1"), self.dim)

    def add(self, entries: Entries) -> None:
        """Add entries after those that are here."""
        with self.writing() as connection:
            copy_rows(connection, self._table, entries)
            self._index(connection)

    def update(self, entries: Entries) -> None:
        """Replace entries."""
        statement = self._table.sql(
            "UPDATE {table} SET text = %s, metadata = %s, facts = %s::uuid[], vector = %s::vector, tokens = %s "
            "WHERE key = %s"
        )
        rows = [
            (text, metadata, facts, vector, tokens, key)
            for vector, (key, _, text, metadata, facts, _, tokens) in zip(
                _literals(entries.vectors), as_rows(entries), strict=True
            )
        ]
        with self.writing() as connection, connection.cursor() as cursor:
            cursor.executemany(statement, rows)

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self.writing() as connection:
            keys = [key_of(name) for name in ids]
            connection.execute(self._table.sql("DELETE FROM {table} WHERE key = ANY (%s::uuid[])"), [keys])

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """What pgvector finds, somewhat more than was asked for, since it compares in float32."""
        facts, count = wanted_facts(filter), 2 * top_k + 32
        # Lengths that overflow float32 in the server change nothing in the order of products.
        given = queries if self.metric == "l2" else directions(queries.double()).float()
        where = "" if facts is None else "WHERE facts @> %(facts)s::uuid[]"
        values = {"facts": facts, "queries": _literals(given), "count": count}
        with self._reading() as connection:
            # An expression that no index has is computed for every entry.
            exact = "" if self._tune(connection, facts, count) else " + 0"
            found = self._rows(
                "SELECT query.number, near.place FROM unnest(%(queries)s::text[]::vector[]) WITH ORDINALITY AS "
                f"query(vector, number), LATERAL (SELECT place FROM {{table}} AS entry {where} "
                f"ORDER BY ({self._compared} {_OPERATORS[self.metric]} query.vector){exact} LIMIT %(count)s) AS near",
                values,
            )
            places = [sorted({place for _, place in found})]
            rows = self._rows(
                f"SELECT place, {_READ} FROM {{table}} WHERE place = ANY (%s::bigint[]) ORDER BY place", places
            )
        number = {place: row for row, (place, *_) in enumerate(rows)}
        near: list[list[int]] = [[] for _ in queries]
        for query, place in found:
            near[query - 1].append(number[place])
        width = max(map(len, near), default=0)
        lines = [line + [-1] * (width - len(line)) for line in near]
        proposed = torch.tensor(lines, dtype=torch.long).view(len(queries), width)
        return Candidates(as_entries([row[1:] for row in rows], self.dim), proposed)

    def save(self, folder: str) -> None:
        """Write a copy of all entries."""
        write_entries(folder, as_entries(self._rows(f"SELECT {_READ} FROM {{table}} ORDER BY place"), self.dim))

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> PgvectorStore:
        """What `save` wrote, in a table that ends with the store, in the same database."""
        entries = read_copy(folder, dim, metric, mapped)
        store = cls(dim, metric, table=None, **settings)
        if len(entries):
            store.add(entries)
        return store

    def drop(self) -> None:
        """Delete the table and all that is in it, and close."""
        with self._connection() as connection:
            connection.execute(self._table.sql("DROP TABLE IF EXISTS {table}, {about}"))
        self.close()

    def close(self) -> None:
        """Close the connections."""
        _close_all(self._free)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection[Any]]:
        """A transaction of this thread, in which everything is done or nothing; other processes wait for its end."""
        if (own := self._within()) is not None:
            yield own
            return
        with self._connection() as connection:
            connection.isolation_level = connection.read_only = None
            with connection.transaction():
                connection.execute(self._table.sql("SELECT 1 FROM {about} FOR UPDATE"))
                self._own.connection = connection
                try:
                    yield connection
                finally:
                    self._own.connection = None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Connection[Any]]:
        """A transaction of this thread, which sees the table as it was at one moment."""
        if (own := self._within()) is not None:
            yield own
            return
        with self._connection() as connection:
            connection.isolation_level, connection.read_only = psycopg().IsolationLevel.REPEATABLE_READ, True
            with connection.transaction():
                self._own.connection = connection
                try:
                    yield connection
                finally:
                    self._own.connection = None

    def _within(self) -> Connection[Any] | None:
        own: Connection[Any] | None = getattr(self._own, "connection", None)
        return own

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection[Any]]:
        """A connection that no other thread uses meanwhile."""
        with self._one:
            try:
                connection = self._free.pop()
            except IndexError:
                connection = _connected(self._dsn)
            try:
                yield connection
            finally:
                if connection.closed:
                    self.close()  # a server that is gone has left all of them
                else:
                    self._free.append(connection)

    def _rows(self, statement: str, values: Any = ()) -> list[Any]:
        with self._reading() as connection, connection.cursor(binary=True) as cursor:
            return cursor.execute(self._table.sql(statement), values).fetchall()

    def _row(self, statement: str) -> Any:
        (row,) = self._rows(statement)
        return row

    def _index(self, connection: Connection[Any]) -> None:
        """Build the index where there are enough entries for the first time, or for lists far more than then."""
        last = connection.execute(self._table.sql("SELECT place FROM {table} ORDER BY place DESC LIMIT 1")).fetchone()
        (indexed,) = self._row("SELECT indexed FROM {about}")
        grown = (last[0] if last else 0) >= (max(_FEW_IN_ALL, 4 * indexed) if self.index == "ivfflat" else _FEW_IN_ALL)
        if self.index is None or not grown or (indexed and self.index == "hnsw"):
            return
        count = len(self)
        if indexed:
            connection.execute(self._table.sql("DROP INDEX {index}"))
        over = f"({self._compared}) {'vector_l2_ops' if self.metric == 'l2' else 'vector_ip_ops'}"
        lists = f"WITH (lists = {_lists(count)})" if self.index == "ivfflat" else ""
        connection.execute(
            self._table.sql(f"CREATE INDEX {{index_name}} ON {{table}} USING {self.index} ({over}) {lists}")
        )
        connection.execute(self._table.sql("UPDATE {about} SET indexed = %s"), [count])

    @property
    def _compared(self) -> str:
        """What queries are compared with; pgvector's own cosine loses very short vectors."""
        return f"l2_normalize(vector)::vector({self.dim:d})" if self.metric == "cosine" else "vector"

    def _tune(self, connection: Connection[Any], facts: list[str] | None, count: int) -> bool:
        """Whether to search with the index; how is set for this transaction."""
        (indexed,) = self._row("SELECT indexed FROM {about}")
        if not indexed or count > _MOST:
            return False
        if facts is not None:
            few = "SELECT count(*) FROM (SELECT FROM {table} WHERE facts @> %s::uuid[] LIMIT %s) AS found"
            ((allowed,),) = self._rows(few, [facts, _FEW_ALLOWED + 1])
            if allowed <= _FEW_ALLOWED:
                return False
        lists = _lists(indexed)
        wanted = {
            "hnsw.ef_search": min(_MOST, max(200, 4 * count)),
            "hnsw.iterative_scan": "relaxed_order",
            "hnsw.max_scan_tuples": 1000 * count,
            "hnsw.scan_mem_multiplier": 8,
            "ivfflat.probes": max(10, math.ceil(lists / 4)),
            "ivfflat.iterative_scan": "relaxed_order",
            "ivfflat.max_probes": max(10, lists),
        }
        values = [
            text for name, value in wanted.items() if name.startswith(str(self.index)) for text in (name, str(value))
        ]
        settings = ", ".join(["set_config(%s, %s, true)"] * (len(values) // 2))
        connection.execute(f"SELECT {settings}", values)
        return True


def _close_all(connections: deque[Connection[Any]]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            connections.pop().close()


def _lists(count: int) -> int:
    """How many lists pgvector recommends for so many entries."""
    return max(1, count // 1000) if count <= 10**6 else math.isqrt(count)


def _literals(vectors: Tensor) -> list[str]:
    return [str(vector) for vector in vectors.tolist()]


def _checked(dsn: str) -> str:
    """A connection string that can be read; where it cannot, the message does not repeat it: it may hold a password."""
    if not isinstance(dsn, str):
        raise ConfigError(f"dsn must be a text such as 'postgresql://user@host/database', got {type(dsn).__name__}")
    try:
        psycopg().conninfo.conninfo_to_dict(dsn)
    except psycopg().ProgrammingError:
        raise ConfigError(
            "libpq cannot read dsn: write it as 'postgresql://user:password@host:port/database', with %-escapes for "
            "what is not a letter or digit, or as 'host=… port=… dbname=… user=…'"
        ) from None
    return dsn


def _connected(dsn: str) -> Connection[Any]:
    library = psycopg()
    try:
        connection: Connection[Any] = library.connect(dsn, autocommit=True)
    except library.OperationalError as error:
        said, password = " ".join(str(error).split()), library.conninfo.conninfo_to_dict(dsn).get("password")
        raise IndexFileError(
            f"cannot open a database of PostgreSQL: {said.replace(password, '…') if password else said}. Start the "
            "server, or name another in dsn= or in the address"
        ) from None
    return connection
