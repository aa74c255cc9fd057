"""A store in a table of PostgreSQL, searched with pgvector.

NAME holds a row per entry: place, id (as JSON), text and metadata (json, which keeps what jsonb would round or refuse;
query it with metadata->>'key'), facts (digests of metadata), vector, and tokens. NAME_about holds one row of JSON about
the table; changes lock it.
"""

from __future__ import annotations

import contextlib
import re
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from json import dumps, loads
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.entries import Id
from mmattn.retrieval.scoring import directions
from mmattn.retrieval.stores.base import register_store
from mmattn.retrieval.stores.database import DatabaseStore, Row, facts_of

if TYPE_CHECKING:
    from psycopg import Connection

#: Fewer entries are compared one by one: in a small table, or under a filter.
_FEW, _FEW_ALLOWED = 1000, 10_000
#: pgvector's own limits: width of indexed vectors, and results of one scan.
_WIDEST, _MOST = 2000, 1000
_ROW = "place, id, text, metadata, vector_send(vector), tokens"
_TABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
#: Lock of processes that make an extension or a table at the same time.
_MAKING = 0x6D6D6174746E


@register_store("pgvector")
class PgvectorStore(DatabaseStore):
    """A table of PostgreSQL with pgvector 0.8 or later.

    Each change is one transaction; processes that change the same table wait for each other, and a search sees the
    table at one moment. Below 1,000 entries, and where a filter leaves at most 10,000, every entry is compared;
    otherwise the HNSW index of pgvector is scanned until enough entries are found that the filter allows.

    Args:
        dim: width e of the vectors.
        metric: "cosine", "ip" or "l2".
        dsn: the database for libpq: "postgresql://user@host/database", "host=… dbname=…", or "" for the environment
            (PGHOST, PGDATABASE, PGPASSWORD, …).
        table: its name, or SCHEMA.NAME.
        index: build an HNSW index at 1,000 entries; False compares every entry.

    Raises:
        ConfigError: the table exists, or indexed vectors are wider than 2,000.
        IndexFileError: no server answers.
        MissingExtraError: psycopg is not installed.
    """

    schemes = ("postgresql", "postgres")

    def __init__(self, dim: int, metric: str, *, dsn: str = "", table: str = "mmattn", index: bool = True) -> None:
        if index and dim > _WIDEST:
            raise ConfigError(f"indexes of pgvector take vectors up to {_WIDEST} wide, got {dim}: give index=False")
        self._use(dsn, table)
        self.index = index
        try:
            with self._transaction() as connection:
                self._create(connection, dim)
                self._begin(dim, metric, index=index, indexed=False)
        except BaseException:
            self.close()
            raise

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """Return the settings in postgresql://user@host/database#table."""
        dsn, mark, table = address.rpartition("#")
        return {"dsn": dsn, "table": table} if mark and _TABLE.fullmatch(table) else {"dsn": address}

    @classmethod
    def connect(cls, *, dsn: str = "", table: str = "mmattn") -> PgvectorStore:
        """Return a store over an existing table."""
        store, errors = cls.__new__(cls), psycopg().errors
        store._use(dsn, table)
        try:
            store.index = store._resume(f"table {table!r}")["index"]
        except (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName) as error:
            store.close()
            raise IndexFileError(
                f"there is no table {table!r} that mmattn made: make one with Index.build(…, store='pgvector', table=…)"
            ) from error
        except BaseException:
            store.close()
            raise
        return store

    def _use(self, dsn: str, table: str) -> None:
        self.name = table
        parts = table.split(".") if isinstance(table, str) else []
        if not 1 <= len(parts) <= 2 or not all(0 < len(part.encode()) <= 48 for part in parts) or "\0" in table:
            raise ConfigError(f"table must be NAME or SCHEMA.NAME, each of 1 to 48 bytes, got {table!r:.120}")
        self._parts = parts
        try:
            psycopg().conninfo.conninfo_to_dict(dsn)
        except psycopg().ProgrammingError:  # the message repeats a part of it, which may be a password
            raise ConfigError(
                "libpq cannot read dsn: write it as 'postgresql://user:password@host:port/database', with %-escapes, "
                "or as 'host=… dbname=… user=…'"
            ) from None
        self._dsn = dsn
        self._free: deque[Connection[Any]] = deque()
        weakref.finalize(self, _close_all, self._free)
        self._thread = threading.local()

    def _create(self, connection: Connection[Any], dim: int) -> None:
        errors = psycopg().errors
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        try:
            connection.execute(
                self._sql(
                    f"CREATE TABLE {{table}} (place bigint PRIMARY KEY, id text NOT NULL UNIQUE, "
                    f"text json NOT NULL, metadata json NOT NULL, facts text[] NOT NULL, vector vector({dim:d}) "
                    "NOT NULL, tokens bytea)"
                )
            )
            connection.execute(self._sql("CREATE TABLE {about} (state json NOT NULL)"))
        except errors.DuplicateTable as error:
            raise ConfigError(
                f"there is a table {self.name!r} (or {self.name + '_about'!r}) already: open it with Index.open("
                f"'postgresql://…#{self.name}'), or give another name in table="
            ) from error
        connection.execute(self._sql("CREATE INDEX ON {table} USING gin (facts)"))
        connection.execute(self._sql("INSERT INTO {about} VALUES ('{{}}')"))

    @property
    def ids(self) -> tuple[Id, ...]:
        """Return all ids, in the order of adding."""
        return tuple(loads(name) for (name,) in self._select("SELECT id FROM {table} ORDER BY place"))

    def __len__(self) -> int:
        return int(self._select("SELECT count(*) FROM {table}")[0][0])

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self.writing() as connection:
            connection.execute(self._sql("DELETE FROM {table} WHERE id = ANY (%s)"), [[dumps(name) for name in ids]])

    def drop(self) -> None:
        """Delete the table, and close."""
        with self._transaction() as connection:
            connection.execute(self._sql("DROP TABLE IF EXISTS {table}, {about}"))
        self.close()

    def close(self) -> None:
        """Close the connections."""
        _close_all(self._free)

    def writing(self) -> contextlib.AbstractContextManager[Connection[Any]]:
        """Return a transaction of this thread; other writers wait for its end."""
        return self._transaction(write=True)

    @contextlib.contextmanager
    def _transaction(self, write: bool = False) -> Iterator[Connection[Any]]:
        """Hold a connection in a transaction of this thread, which sees one moment unless it writes."""
        current: Connection[Any] | None = getattr(self._thread, "connection", None)
        if current is not None:
            yield current
            return
        levels = psycopg().IsolationLevel
        connection = self._free.pop() if self._free else _open_connection(self._dsn)
        try:
            connection.isolation_level = levels.READ_COMMITTED if write else levels.REPEATABLE_READ
            with connection.transaction():
                if write:
                    connection.execute(self._sql("SELECT 1 FROM {about} FOR UPDATE"))
                self._thread.connection = connection
                yield connection
        finally:
            self._thread.connection = None
            if connection.closed:
                self.close()  # a server that is gone has left all of them
            else:
                self._free.append(connection)

    def _sql(self, statement: str) -> Any:
        """Return a statement with the quoted names of {table} and {about}."""
        sql = import_extra("psycopg.sql", "postgres")
        *schema, name = self._parts
        return sql.SQL(statement).format(
            table=sql.Identifier(*schema, name),
            about=sql.Identifier(*schema, f"{name}_about"),
        )

    def _select(self, statement: str, values: Any = ()) -> list[Any]:
        with self._transaction() as connection, connection.cursor(binary=True) as cursor:
            return cursor.execute(self._sql(statement), values).fetchall()

    def _read_state(self) -> dict[str, Any]:
        rows = self._select("SELECT state FROM {about}")
        return rows[0][0] if rows and isinstance(rows[0][0], dict) else {}

    def _write_state(self, state: dict[str, Any]) -> None:
        with self.writing() as connection:
            connection.execute(self._sql("UPDATE {about} SET state = %s"), [dumps(state)])

    def _fetch(self, ids: Sequence[Id] | None) -> list[Row]:
        if ids is None:
            return [_as_row(row) for row in self._select(f"SELECT {_ROW} FROM {{table}}")]
        statement = f"SELECT {_ROW} FROM {{table}} WHERE id = ANY (%s)"
        return [_as_row(row) for row in self._select(statement, [[dumps(name) for name in ids]])]

    def _insert(self, rows: list[Row]) -> None:
        with self.writing() as connection:
            self._copy(connection, rows)
            self._build_index(connection, rows[-1].place)

    def _replace(self, rows: list[Row]) -> None:
        with self.writing() as connection:
            connection.execute(self._sql("DELETE FROM {table} WHERE place = ANY (%s)"), [[row.place for row in rows]])
            self._copy(connection, rows)

    def _copy(self, connection: Connection[Any], rows: list[Row]) -> None:
        head = struct.pack(">HH", self.dim, 0)  # with big-endian floats, what vector_recv of pgvector reads
        columns = "place, id, text, metadata, facts, vector, tokens"
        statement = self._sql(f"COPY {{table}} ({columns}) FROM STDIN (FORMAT binary)")
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types(("int8", "text", "text", "text", "text[]", "bytea", "bytea"))
            for row in rows:
                vector = head + row.vector.numpy().astype(">f4").tobytes()
                values = dumps(row.id), dumps(row.text), dumps(row.metadata), facts_of(row.metadata)
                copy.write_row((row.place, *values, vector, row.tokens))

    def _nearest(self, queries: Tensor, count: int, facts: list[str]) -> list[list[Row]]:
        # Directions, since lengths could overflow float32 in the server, and do not change the order of products.
        scaled = queries if self.metric == "l2" else directions(queries.double()).float()
        where, operator = "WHERE facts @> %(facts)s" if facts else "", "<->" if self.metric == "l2" else "<#>"
        with self._transaction() as connection:
            # An expression that no index has is computed for every entry.
            exact = "" if self._tune(connection, facts, count) else " + 0"
            statement = (
                f"SELECT query.number, near.* FROM unnest(%(queries)s::text[]::vector[]) WITH ORDINALITY AS "
                f"query(vector, number), LATERAL (SELECT {_ROW} FROM {{table}} AS entry {where} ORDER BY "
                f"({self._compared} {operator} query.vector){exact} LIMIT %(count)s) AS near"
            )
            literals = [str(vector) for vector in scaled.tolist()]
            rows = self._select(statement, {"queries": literals, "facts": facts, "count": count})
        near: list[list[Row]] = [[] for _ in queries]
        for number, *row in rows:
            near[number - 1].append(_as_row(row))
        return near

    @property
    def _compared(self) -> str:
        """The expression that queries are compared with; pgvector's own cosine loses very short vectors."""
        return f"l2_normalize(entry.vector)::vector({self.dim:d})" if self.metric == "cosine" else "entry.vector"

    def _build_index(self, connection: Connection[Any], place: int) -> None:
        state = self._read_state()
        if self.index and place >= _FEW and not state["indexed"]:
            over, operators = self._compared.replace("entry.", ""), "l2" if self.metric == "l2" else "ip"
            statement = f"CREATE INDEX ON {{table}} USING hnsw (({over}) vector_{operators}_ops)"
            connection.execute(self._sql(statement))
            self._write_state({**state, "indexed": True})

    def _tune(self, connection: Connection[Any], facts: list[str], count: int) -> bool:
        """Set the parameters of a search with the index, and return whether to use it."""
        if count > _MOST or not self._read_state()["indexed"]:
            return False
        if facts:
            count_allowed = "SELECT count(*) FROM (SELECT FROM {table} WHERE facts @> %s LIMIT %s) AS allowed"
            if self._select(count_allowed, [facts, _FEW_ALLOWED + 1])[0][0] <= _FEW_ALLOWED:
                return False
        parameters = {
            "ef_search": min(_MOST, max(200, 4 * count)),
            "iterative_scan": "relaxed_order",
            "max_scan_tuples": 1000 * count,
            "scan_mem_multiplier": 8,
        }
        for name, value in parameters.items():
            connection.execute("SELECT set_config(%s, %s, true)", [f"hnsw.{name}", str(value)])
        return True


def psycopg() -> Any:
    """Return the library, or raise an error that names the extra."""
    return import_extra("psycopg", "postgres")


def _as_row(columns: Sequence[Any]) -> Row:
    place, name, text, metadata, vector, tokens = columns
    values = torch.frombuffer(bytearray(vector), dtype=torch.uint8)[4:].view(-1, 4).flip(1).flatten()
    return Row(place, loads(name), text, metadata, values.view(torch.float32), tokens)


def _close_all(connections: deque[Connection[Any]]) -> None:
    while connections:
        connections.pop().close()


def _open_connection(dsn: str) -> Connection[Any]:
    library = psycopg()
    try:
        connection: Connection[Any] = library.connect(dsn, autocommit=True)
    except library.OperationalError as error:
        reason, password = " ".join(str(error).split()), library.conninfo.conninfo_to_dict(dsn).get("password")
        raise IndexFileError(
            f"cannot open a database of PostgreSQL: {reason.replace(password, '…') if password else reason}. Start the "
            "server, or name another in dsn= or in the address"
        ) from None
    return connection
