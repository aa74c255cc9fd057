"""A vector store in a table of SQLite: exact, in this process, in one file. Importing it registers "sqlite"."""

import json
import os
import sqlite3
import threading

import torch

from mmattn.errors import IndexFileError
from mmattn.extend import Candidates, Entries, best_rows, register_store

TABLE = "CREATE TABLE entries (place INTEGER PRIMARY KEY, id UNIQUE, text, metadata, vector)"
FILE = "entries.sqlite"


@register_store("sqlite")
class SqliteStore:
    """Reads the whole table for every search: fine for some thousands of entries."""

    recall = 1.0
    holds_tokens = False

    def __init__(self, dim, metric):
        self.dim, self.metric, self.about, self.settings = dim, metric, {}, {}
        self._lock = threading.Lock()
        self._table = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._table.execute(TABLE)

    @property
    def ids(self):
        return tuple(json.loads(name) for (name,) in self._run("SELECT id FROM entries ORDER BY place"))

    def __len__(self):
        return self._run("SELECT count(*) FROM entries")[0][0]

    def get(self, ids):
        wanted = {json.dumps(name) for name in ids}
        return self._entries(row for row in self._rows() if row[0] in wanted)

    def add(self, entries):
        self._change("INSERT INTO entries (id, text, metadata, vector) VALUES (?, ?, ?, ?)", _as_rows(entries))

    def update(self, entries):
        rows = [(*row[1:], row[0]) for row in _as_rows(entries)]
        self._change("UPDATE entries SET text = ?, metadata = ?, vector = ? WHERE id = ?", rows)

    def delete(self, ids):
        self._change("DELETE FROM entries WHERE id = ?", [(json.dumps(name),) for name in ids])

    def search(self, queries, top_k, filter):
        entries = self._entries(self._rows())
        allowed = entries.allowed(filter)
        rows = torch.arange(len(entries)) if allowed is None else allowed.nonzero()[:, 0]
        rows = rows.expand(len(queries), -1)
        return Candidates(entries, best_rows(queries, entries.vectors, rows, self.metric, top_k))

    def save(self, folder):
        with self._lock:
            self._table.execute("VACUUM INTO ?", (os.path.join(folder, FILE),))

    @classmethod
    def open(cls, folder, dim, metric, *, mapped=False):
        store = cls(dim, metric)
        saved = sqlite3.connect(os.path.join(folder, FILE))
        try:
            saved.backup(store._table)
            store.ids, store._entries(store._rows())
        except (sqlite3.Error, ValueError, TypeError, RuntimeError) as error:
            raise IndexFileError(f"{FILE} holds no entries of width {dim}: {error}") from error
        finally:
            saved.close()
        return store

    def close(self):
        self._table.close()

    def _run(self, statement):
        with self._lock:
            return self._table.execute(statement).fetchall()

    def _rows(self):
        return self._run("SELECT id, text, metadata, vector FROM entries ORDER BY place")

    def _change(self, statement, rows):
        with self._lock:
            self._table.execute("BEGIN")
            try:
                self._table.executemany(statement, rows)
            except BaseException:
                self._table.execute("ROLLBACK")
                raise
            self._table.execute("COMMIT")

    def _entries(self, rows):
        ids, texts, metadata, vectors = list(zip(*rows, strict=True)) or [()] * 4
        vectors = torch.frombuffer(bytearray(b"".join(vectors)), dtype=torch.float32) if vectors else torch.empty(0)
        ids, metadata = map(json.loads, ids), map(json.loads, metadata)
        return Entries(tuple(ids), tuple(texts), tuple(metadata), vectors.view(-1, self.dim))


def _as_rows(entries):
    columns = zip(entries.ids, entries.texts, entries.metadata, entries.vectors, strict=True)
    return [(json.dumps(a), b, json.dumps(c), d.numpy().tobytes()) for a, b, c, d in columns]
