"""How entries lie in a table of PostgreSQL, so that every answer can be that of `Index`.

place     counts in the order of adding; an update leaves it
key       the UUID5 of the id: 1 and "1" have two
id        text or an int, as JSON
text      as it is; only one with a NUL, which text of PostgreSQL cannot hold, is JSON after a mark
metadata  JSON as it was given: jsonb would make 1e300 an int and refuse "\\u0000". Query it with metadata->>'key', or
          metadata::jsonb
facts     a digest of each key and value of the metadata, by which filters compare
vector    of pgvector, in float32
tokens    the encoded tokens, a safetensors file

Beside NAME lies NAME_about, one row: what the table is, and what the index knows of it. Changes of entries lock it.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from json import dumps, loads
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.entries import Entries
from mmattn.retrieval.scoring import METRICS
from mmattn.retrieval.stores.packed_tokens import pack_tokens, unpack_tokens
from mmattn.retrieval.stores.store_state import facts_of, key_of

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

FORMAT_VERSION = 1

#: What `copy_rows` writes, and in which types.
_COLUMNS = "key, id, text, metadata, facts, vector, tokens"
_TYPES = ("uuid", "json", "text", "json", "uuid[]", "bytea", "bytea")
_NUL = "\x01"
#: What two processes that make an extension or a table at the same time wait for.
_MAKING = 0x6D6D6174746E


def psycopg() -> Any:
    """The library, or a message which extra brings it."""
    return import_extra("psycopg", "postgres")


class Table:
    """The statements over one table and the one beside it, names quoted.

    Args:
        name: NAME or SCHEMA.NAME; None for tables that last as long as a connection.

    Raises:
        ConfigError: no name, or a longer one than PostgreSQL takes.
    """

    def __init__(self, name: str | None) -> None:
        self.name, self.temporary = "mmattn_copy" if name is None else name, name is None
        parts = self.name.split(".") if isinstance(self.name, str) else []
        if not 1 <= len(parts) <= 2 or not all(0 < len(part.encode()) <= 48 for part in parts) or "\0" in self.name:
            raise ConfigError(f"table must be NAME or SCHEMA.NAME, each of 1 to 48 bytes, got {name!r:.120}")
        self._parts = parts

    def sql(self, statement: str, **parts: Any) -> Composed:
        """A statement in which {table}, {about} and {index} stand for their names, and {…} for further parts."""
        sql = import_extra("psycopg.sql", "postgres")
        *schema, name = self._parts
        names = {
            "table": sql.Identifier(*schema, name),
            "about": sql.Identifier(*schema, f"{name}_about"),
            "index": sql.Identifier(*schema, f"{name}_vector"),
            "index_name": sql.Identifier(f"{name}_vector"),
        }
        found: Composed = sql.SQL(statement).format(**names, **parts)
        return found

    def create(self, connection: Connection[Any], dim: int, metric: str, search: str | None) -> None:
        """Make the tables, in a transaction.

        Raises:
            ConfigError: there is such a table, or the server has no pgvector of 0.8 or later.
        """
        errors, sql = psycopg().errors, import_extra("psycopg.sql", "postgres")
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
        try:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except (errors.FeatureNotSupported, errors.UndefinedFile, errors.InsufficientPrivilege) as error:
            raise ConfigError(
                f"this store needs the extension pgvector in the database, and it cannot be made: {error}. Install "
                "pgvector on the server, or have its owner run: CREATE EXTENSION vector"
            ) from error
        check_extension(connection)
        kind = sql.SQL("TEMPORARY TABLE" if self.temporary else "TABLE")
        try:
            connection.execute(
                self.sql(
                    "CREATE {kind} {table} (place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
                    "key uuid NOT NULL UNIQUE, id json NOT NULL, text text, metadata json NOT NULL, "
                    "facts uuid[] NOT NULL, vector vector({dim}) NOT NULL, tokens bytea)",
                    kind=kind,
                    dim=sql.Literal(dim),
                )
            )
            connection.execute(
                self.sql(
                    "CREATE {kind} {about} (format_version int NOT NULL, dim int NOT NULL, metric text NOT NULL, "
                    "search text, indexed bigint NOT NULL, encoder text, next_id numeric NOT NULL)",
                    kind=kind,
                )
            )
        except errors.DuplicateTable as error:
            raise ConfigError(
                f"there is a table {self.name!r} (or {self.name + '_about'!r}) already: open it with Index.open("
                f"'postgresql://…#{self.name}'), give another name in table=, or drop both"
            ) from error
        connection.execute(self.sql("CREATE INDEX ON {table} USING gin (facts)"))
        connection.execute(
            self.sql("INSERT INTO {about} VALUES (%s, %s, %s, %s, 0, NULL, 0)"),
            [FORMAT_VERSION, dim, metric, search],
        )

    def describe(self, connection: Connection[Any]) -> tuple[int, str, str | None]:
        """Width, metric and index of a table that is there.

        Raises:
            IndexFileError: there is no such table, or it was made by something else or by another version.
        """
        errors = psycopg().errors
        try:
            found = connection.execute(self.sql("SELECT * FROM {about}")).fetchone()
            connection.execute(self.sql("SELECT 1 FROM {table} LIMIT 0"))
        except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
            raise IndexFileError(
                f"there is no table {self.name!r} that mmattn made; those in this database: "
                f"{', '.join(tables(connection)) or 'none'}. Make one with Index.build(…, store='pgvector', table=…)"
            ) from error
        if found is None or found[0] != FORMAT_VERSION or len(found) != 7 or found[2] not in METRICS:
            raise IndexFileError(
                f"table {self.name!r} is not of this version of mmattn: beside it stands {found!r:.200}, and this "
                f"version reads format {FORMAT_VERSION}. Build one under another name"
            )
        check_extension(connection)
        return found[1], found[2], found[3]


def tables(connection: Connection[Any]) -> list[str]:
    """The names of the tables that mmattn made, at most eight."""
    rows = connection.execute(
        "SELECT left(table_name, -6) FROM information_schema.columns WHERE column_name = 'format_version' "
        "AND right(table_name, 6) = '_about' AND table_schema = ANY (current_schemas(false)) ORDER BY 1 LIMIT 8"
    )
    return [name for (name,) in rows.fetchall()]


def check_extension(connection: Connection[Any]) -> None:
    """Refuse a pgvector without iterative scans.

    Raises:
        ConfigError: it is older than 0.8.
    """
    found = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
    version = found[0] if found else "none"
    if found is None or tuple(map(int, version.split(".")[:2])) < (0, 8):
        raise ConfigError(
            f"this store needs pgvector 0.8 or later, and the database has {version}: install a newer one on the "
            "server, and run: ALTER EXTENSION vector UPDATE"
        )


def copy_rows(connection: Connection[Any], table: Table, entries: Entries) -> None:
    """Write entries after those that are there."""
    statement = table.sql(f"COPY {{table}} ({_COLUMNS}) FROM STDIN (FORMAT binary)")
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(_TYPES)
        for row in as_rows(entries):
            copy.write_row(row)


def as_rows(entries: Entries) -> Iterator[tuple[Any, ...]]:
    """The columns of each entry: key, id, text, metadata, facts, vector, tokens."""
    json = import_extra("psycopg.types.json", "postgres").Json  # None is null in JSON, and not NULL
    head = struct.pack(">HH", entries.vectors.shape[1], 0)  # what vector_recv of pgvector reads
    vectors = entries.vectors.numpy().astype(">f4")
    packed = pack_tokens(entries.tokens, len(entries))
    for row, name in enumerate(entries.ids):
        metadata, text = entries.metadata[row], entries.texts[row]
        if text is not None and ("\0" in text or text.startswith(_NUL)):
            text = _NUL + dumps(text)
        facts = list(map(uuid.UUID, facts_of(metadata)))
        yield (
            uuid.UUID(key_of(name)),
            json(name),
            text,
            json(metadata),
            facts,
            head + vectors[row].tobytes(),
            packed[row],
        )


def as_entries(rows: Sequence[Sequence[Any]], dim: int) -> Entries:
    """Rows of id, text, metadata, vector and tokens as entries."""
    ids, texts, metadata, vectors, packed = list(zip(*rows, strict=True)) or [()] * 5
    plain = (loads(text[1:]) if text is not None and text.startswith(_NUL) else text for text in texts)
    return Entries(ids, tuple(plain), metadata, _unpacked(vectors, dim), unpack_tokens(list(packed)))


def _unpacked(vectors: Sequence[bytes], dim: int) -> Tensor:
    import numpy

    raw = b"".join(vector[4:] for vector in vectors)
    return torch.from_numpy(numpy.frombuffer(raw, ">f4").astype("f4").reshape(-1, dim)) if raw else torch.empty(0, dim)
