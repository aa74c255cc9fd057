"""A store in a table of PostgreSQL, searched with pgvector.

NAME holds a row per entry: place, id (as JSON), text and metadata (json, which keeps what jsonb would round or refuse;
query it with metadata->>'key'), facts (digests of metadata), vector, and tokens. NAME_about holds one row of JSON about
the table.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from json import dumps, loads
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.stores import register_store
from mmattn.retrieval.stores.database import DatabaseStore, Row, State

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

#: Fewer entries are compared one by one.
_FEW = 1000
#: pgvector's own limits: width of indexed vectors, and results of one scan.
_WIDEST, _MOST = 2000, 1000
_ROW = "place, id, text::text, metadata::text, tokens, vector::text"
_TABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
#: Advisory lock that a writer holds.
_WRITING = 0x6D6D6174746E


@register_store("pgvector")
class PgvectorStore(DatabaseStore):
    """A table of PostgreSQL with pgvector 0.8 or later.

    Each change is one transaction; writers of one database wait for each other, and a search sees the
    table at one moment. Below 1,000 entries, and under a filter, every entry is compared; otherwise the HNSW index of
    pgvector is searched.

    Args:
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

    def __init__(
        self, dim: int | None, metric: str, *, dsn: str = "", table: str = "mmattn", index: bool = True
    ) -> None:
        if index and (dim or 0) > _WIDEST:
            raise ConfigError(f"indexes of pgvector take vectors up to {_WIDEST} wide, got {dim}: give index=False")
        if dim is None and not index:
            raise ConfigError("a table has its index or none since it was made: leave index= out to open it")
        parts = table.split(".") if isinstance(table, str) else []
        if not 1 <= len(parts) <= 2 or not all(0 < len(part.encode()) <= 48 for part in parts) or "\0" in table:
            raise ConfigError(f"table must be NAME or SCHEMA.NAME, each of 1 to 48 bytes, got {table!r:.120}")
        self.place, self._lock = f"table {table!r}", threading.RLock()
        self._library = import_extra("psycopg", "postgres")
        *schema, name = parts
        named = self._library.sql.Identifier
        self._names = {"table": named(*schema, name), "about": named(*schema, f"{name}_about")}
        self._dsn = dsn
        self._connection: Connection | None = None
        super().__init__(dim, metric, False if index else None)

    @classmethod
    def settings_of(cls, address: str) -> dict[str, str]:
        """Return the settings in postgresql://user@host/database#table."""
        dsn, mark, table = address.rpartition("#")
        return {"dsn": dsn, "table": table} if mark and _TABLE.fullmatch(table) else {"dsn": address}

    def _connected(self) -> Connection:
        """Return the connection, opened anew where the server has closed it."""
        if self._connection is None or self._connection.closed:
            library = self._library
            try:
                self._connection = library.connect(self._dsn, autocommit=True)
            except library.ProgrammingError:  # the message repeats a part of dsn, which may be a password
                raise ConfigError(
                    "libpq cannot read dsn: write it as 'postgresql://user:password@host:port/database', with "
                    "%-escapes, or as 'host=… dbname=… user=…'"
                ) from None
            except library.OperationalError as error:
                reason = " ".join(str(error).split())
                password = library.conninfo.conninfo_to_dict(self._dsn).get("password")
                raise IndexFileError(
                    f"cannot open a database of PostgreSQL: {reason.replace(password, '…') if password else reason}. "
                    "Start the server, or name another in dsn= or in the address"
                ) from None
            weakref.finalize(self, self._connection.close)
        return self._connection

    def _exists(self) -> bool:
        names = [self._sql(name).as_string() for name in ("{table}", "{about}")]
        return bool(self._run("SELECT coalesce(to_regclass(%s), to_regclass(%s))", names)[0][0])

    def _create(self) -> None:
        self._run("CREATE EXTENSION IF NOT EXISTS vector")
        self._run(
            f"CREATE TABLE {{table}} (place bigint PRIMARY KEY, id text NOT NULL UNIQUE, text json NOT NULL, "
            f"metadata json NOT NULL, facts text[] NOT NULL, vector vector({self.dim:d}) NOT NULL, tokens bytea)"
        )
        self._run("CREATE INDEX ON {table} USING gin (facts)")
        self._run("CREATE TABLE {about} (state json NOT NULL)")

    def __len__(self) -> int:
        return int(self._run("SELECT count(*) FROM {table}")[0][0])

    def drop(self) -> None:
        """Delete the table, and close."""
        self._run("DROP TABLE IF EXISTS {table}, {about}")
        self.close()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:  # a change under way would go on without its transaction
            if self._connection is not None:
                self._connection.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold a transaction; other writers wait for its end."""
        with self._lock, self._connected().transaction():
            self._run("SELECT pg_advisory_xact_lock(%s)", [_WRITING])
            yield

    def _sql(self, statement: str) -> Composed:
        """Return a statement with the quoted names of {table} and {about}."""
        return self._library.sql.SQL(statement).format(**self._names)

    def _run(self, statement: str, values: Sequence[object] | dict[str, object] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            cursor = self._connected().execute(self._sql(statement), values)
            return cursor.fetchall() if cursor.description else []

    def _ids(self) -> list[str]:
        return [name for (name,) in self._run("SELECT id FROM {table} ORDER BY place")]

    def _delete(self, ids: list[str]) -> None:
        self._run("DELETE FROM {table} WHERE id = ANY (%s)", [ids])

    def _read_state(self) -> State:
        errors = self._library.errors
        try:
            rows = self._run("SELECT state FROM {about}")
        except (errors.UndefinedTable, errors.UndefinedColumn):  # a table that others made
            return {}
        return rows[0][0] if rows else {}

    def _write_state(self, state: State) -> None:
        with self.writing():
            self._run("DELETE FROM {about}")
            self._run("INSERT INTO {about} VALUES (%s)", [dumps(state)])

    def _fetch(self, ids: list[str] | None) -> list[Row]:
        where = "" if ids is None else "WHERE id = ANY (%(ids)s)"
        return [_as_row(row) for row in self._run(f"SELECT {_ROW} FROM {{table}} {where}", {"ids": ids})]

    def _insert(self, rows: list[Row]) -> None:
        statement = self._sql("COPY {table} (place, id, text, metadata, facts, vector, tokens) FROM STDIN")
        with self._connected().cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                vector = dumps(row.vector.tolist())
                copy.write_row((row.place, row.id, dumps(row.text), row.metadata, row.facts, vector, row.tokens))
        state = self._read_state()
        if rows[-1].place >= _FEW and state["indexed"] is False:
            over, operators = self._compared.replace("entry.", ""), "l2" if self.metric == "l2" else "ip"
            self._run(f"CREATE INDEX ON {{table}} USING hnsw (({over}) vector_{operators}_ops)")
            self._write_state({**state, "indexed": True})

    def _nearest(self, queries: Tensor, count: int, facts: list[list[str]]) -> list[list[Row]]:
        conditions = {f"facts_{number}": part for number, part in enumerate(facts)}
        where = f"WHERE {' AND '.join(f'facts && %({name})s' for name in conditions)}" if facts else ""
        operator = "<->" if self.metric == "l2" else "<#>"
        indexed = not facts and count <= _MOST and self._read_state()["indexed"]
        # An expression that no index has is computed for every entry.
        exact = "" if indexed else " + 0"
        statement = (
            f"SELECT query.number, near.* FROM unnest(%(queries)s::text[]::vector[]) WITH ORDINALITY AS "
            f"query(vector, number), LATERAL (SELECT {_ROW} FROM {{table}} AS entry {where} ORDER BY "
            f"({self._compared} {operator} query.vector){exact} LIMIT %(count)s) AS near"
        )
        literals = [dumps(vector) for vector in queries.tolist()]
        with self._connected().transaction():
            if indexed:
                # Rows that were replaced stay in the index until a vacuum: the scan goes on behind them.
                self._run("SELECT set_config('hnsw.iterative_scan', 'relaxed_order', true)")
                self._run("SELECT set_config('hnsw.ef_search', %s, true)", [str(min(_MOST, max(200, 4 * count)))])
            rows = self._run(statement, {"queries": literals, "count": count, **conditions})
        near: list[list[Row]] = [[] for _ in queries]
        for number, *row in rows:
            near[number - 1].append(_as_row(row))
        return near

    @property
    def _compared(self) -> str:
        """The expression that queries are compared with; pgvector's own cosine loses very short vectors."""
        return f"l2_normalize(entry.vector)::vector({self.dim:d})" if self.metric == "cosine" else "entry.vector"


def _as_row(columns: Sequence[Any]) -> Row:
    place, name, text, metadata, tokens, vector = columns
    return Row(place, name, loads(text), metadata, tokens, torch.tensor(loads(vector), dtype=torch.float32))
