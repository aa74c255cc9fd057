"""A store whose entries are in a table of LanceDB: in memory, in a folder, or in an object store.

NAME         a row for each entry: place in the order of adding, key (the UUID5 of the id), id and metadata as JSON,
             text, facts (a digest of each key and value of the metadata), vector, tokens (a safetensors file), and
             under the cosine direction, the vector at length 1, which is what is searched: short ones lose nothing then
NAME_about   one row of JSON: what the table is, and what the index knows of it
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.entries import Entries, Filter, Id
from mmattn.retrieval.scoring import METRICS, directions
from mmattn.retrieval.stores.base import Candidates
from mmattn.retrieval.stores.entry_files import read_copy, write_entries
from mmattn.retrieval.stores.packed_tokens import pack_tokens, unpack_tokens
from mmattn.retrieval.stores.registry import register_store
from mmattn.retrieval.stores.store_state import facts_of, key_of, wanted_facts
from mmattn.storage.files import lock_folder

if TYPE_CHECKING:
    import pyarrow

FORMAT_VERSION = 1

_MEMORY = "memory://"
#: Each change leaves files; after so many changes they are written together, and those of versions that nobody can
#: still be reading go.
_CHANGES, _KEPT = 100, timedelta(minutes=10)
_READ = ["place", "id", "text", "metadata", "vector", "tokens"]
#: How long queries are: the engine computes 1 - product in float32, which loses products that are small beside 1.
_LENGTH = 2.0**60


@register_store("lancedb")
class LanceStore:
    """A table of LanceDB, which this makes and `connect` finds again. A search compares every entry, in float32.

    Each change is one version of the table, and a search sees one version. Processes that change a table in a folder
    wait for each other; of a table in an object store one process at a time may change entries, and any number search.

    Args:
        dim: width e of the vectors.
        metric: how they are compared.
        uri: of the database: a folder, an address such as "s3://bucket/path", or "memory://".
        table: its name.

    Raises:
        ConfigError: there is such a table.
        MissingExtraError: lancedb is not installed.
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 0.99
    holds_tokens: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("lance",)

    def __init__(self, dim: int, metric: str, *, uri: str | os.PathLike[str] = _MEMORY, table: str = "mmattn") -> None:
        self._use(uri, table)
        self.dim, self.metric = dim, metric
        about = {"format_version": FORMAT_VERSION, "dim": dim, "metric": metric, "next_place": 0}
        with self._locked():
            for name, schema in ((table, _schema(dim, metric)), (self._about_name, _about_row({}).schema)):
                try:
                    self._database.create_table(name, schema=schema)
                except ValueError as error:
                    if "already exists" not in str(error):
                        raise
                    raise ConfigError(
                        f"there is a table {name!r} already: open it with Index.open('lance:{self.uri}#{table}'), give "
                        "another name in table=, or drop both of its tables"
                    ) from error
            self._open()
            self._write_about({**about, "encoder": None, "next_id": 0})

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """The settings that an address names: lance:FOLDER#table, or lance:s3://bucket/path#table.

        Args:
            address: a folder or an address of LanceDB, and the table after "#"; without one it is "mmattn".
        """
        uri, mark, table = address.removeprefix("lance:").partition("#")
        return {"uri": uri, "table": table} if mark else {"uri": uri}

    @classmethod
    def connect(cls, *, uri: str | os.PathLike[str], table: str = "mmattn") -> LanceStore:
        """A store over a table that is there.

        Args:
            uri: as for a new one.
            table: its name.

        Raises:
            IndexFileError: there is no such table, or it was made by something else or by another version.
        """
        store = cls.__new__(cls)
        if "://" not in os.fspath(uri) and not os.path.isdir(uri):
            raise IndexFileError(
                f"there is no folder {os.fspath(uri)!r}: make an index there with Index.build(…, store=…)"
            )
        store._use(uri, table)
        try:
            store._open()
            about = store._read_about()
        except ValueError as error:
            if "not found" not in str(error):
                raise
            raise IndexFileError(
                f"there is no table {table!r} that mmattn made in {store.uri!r}; its tables: "
                f"{', '.join(store._database.list_tables().tables[:8]) or 'none'}. Make one with Index.build(…, "
                "store='lancedb', uri=…, table=…)"
            ) from error
        if about.get("format_version") != FORMAT_VERSION or about.get("metric") not in METRICS:
            raise IndexFileError(
                f"table {table!r} is not of this version of mmattn: beside it stands {about!r:.200}, and this version "
                f"reads format {FORMAT_VERSION}. Build one under another name"
            )
        store.dim, store.metric = about["dim"], about["metric"]
        return store

    def _use(self, uri: str | os.PathLike[str], table: str) -> None:
        self.uri, self.name = os.fspath(uri), table
        self._about_name = f"{table}_about"
        # Every search looks for what other processes have written.
        library = import_extra("lancedb", "lance")
        self._database = library.connect(self.uri, read_consistency_interval=timedelta(0))
        self._own = threading.local()
        self._changes = 0

    def _open(self) -> None:
        self.table = self._database.open_table(self.name)
        self._about_table = self._database.open_table(self._about_name)

    @property
    def settings(self) -> dict[str, Any]:
        """None: what was saved is a copy, which is opened in memory."""
        return {}

    @property
    def about(self) -> dict[str, Any]:
        """The encoder and the next id, as the table says now."""
        about = self._read_about()
        return {"encoder": about["encoder"], "next_id": about["next_id"]}

    @about.setter
    def about(self, about: dict[str, Any]) -> None:
        with self.writing():
            self._own.about = {**self._own.about, **about}

    @property
    def ids(self) -> tuple[Id, ...]:
        """All ids, in the order in which the entries were added; every one is fetched."""
        rows = self.table.search().select(["place", "id"]).to_arrow().sort_by("place")
        return tuple(map(json.loads, rows["id"].to_pylist()))

    def __len__(self) -> int:
        return int(self.table.count_rows())

    def get(self, ids: Sequence[Id]) -> Entries:
        """The entries of those of these ids that are here."""
        return _as_entries(self._fetch(ids), self.dim)

    def one(self) -> Entries:
        """One entry, or none."""
        return _as_entries(self.table.search().select(_READ).limit(1).to_arrow(), self.dim)

    def add(self, entries: Entries) -> None:
        """Add entries after those that are here."""
        with self.writing():
            first = self._own.about["next_place"]
            end = first + len(entries)
            self._own.about = {**self._own.about, "next_place": end}
            self._write_about(self._own.about)  # killed after this, the table has a gap in its places, and no more
            self._own.written = self._own.about
            self.table.add(_as_rows(entries, list(range(first, end)), self.table.schema))
            self._changed()

    def update(self, entries: Entries) -> None:
        """Replace entries."""
        with self.writing():
            old = self._fetch(entries.ids)
            place = dict(zip(map(json.loads, old["id"].to_pylist()), old["place"].to_pylist(), strict=True))
            rows = _as_rows(entries, [place[name] for name in entries.ids], self.table.schema)
            self.table.merge_insert("key").when_matched_update_all().execute(rows)
            self._changed()

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self.writing():
            self.table.delete(_among(ids))
            self._changed()

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """What LanceDB finds, somewhat more than was asked for, since it compares in float32."""
        facts = wanted_facts(filter)
        if not len(queries):
            return Candidates(self.one(), torch.empty(0, 0, dtype=torch.long))
        given = queries if self.metric == "l2" else (directions(queries.double()) * _LENGTH).float()
        column = "direction" if self.metric == "cosine" else "vector"
        request = self.table.search(list(given.numpy()), vector_column_name=column).select([*_READ, "_distance"])
        request = request.distance_type("l2" if self.metric == "l2" else "dot").limit(2 * top_k + 32)
        if facts:
            request = request.where(f"array_has_all(facts, [{_quoted(facts)}])", prefilter=True)
        return _as_candidates(request.to_arrow(), len(queries), self.dim)

    def save(self, folder: str) -> None:
        """Write a copy of all entries."""
        write_entries(folder, _as_entries(self.table.search().select(_READ).to_arrow(), self.dim))

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> LanceStore:
        """What `save` wrote, in a table in the memory of this process."""
        entries = read_copy(folder, dim, metric, mapped)
        store = cls(dim, metric, **settings)
        if len(entries):
            store.add(entries)
        return store

    def drop(self) -> None:
        """Delete the table and all that is in it, and close."""
        for name in (self.name, self._about_name):
            self._database.drop_table(name, ignore_missing=True)

    def close(self) -> None:
        """Nothing to give back: files are open only while they are read."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """What this thread does to the entries: other processes wait for its end. Each verb is all or none."""
        if getattr(self._own, "about", None) is not None:
            yield
            return
        with self._locked():
            self._own.about = self._own.written = self._read_about()
            try:
                yield
                if self._own.about is not self._own.written:
                    self._write_about(self._own.about)
            finally:
                self._own.about = None

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        if "://" in self.uri:
            return contextlib.nullcontext()
        os.makedirs(self.uri, exist_ok=True)
        return lock_folder(self.uri)

    def _changed(self) -> None:
        self._changes += 1
        if self._changes % _CHANGES == 0:
            self.table.optimize(cleanup_older_than=_KEPT)
            self._about_table.optimize(cleanup_older_than=timedelta(minutes=1))  # one row, read in an instant

    def _read_about(self) -> dict[str, Any]:
        within: dict[str, Any] | None = getattr(self._own, "about", None)
        if within is not None:
            return within
        (row,) = self._about_table.search().to_arrow().to_pylist() or [{"about": "{}"}]
        about: dict[str, Any] = json.loads(row["about"])
        return about

    def _write_about(self, about: dict[str, Any]) -> None:
        self._about_table.add(_about_row(about), mode="overwrite")

    def _fetch(self, ids: Sequence[Id]) -> pyarrow.Table:
        if not ids:
            return self.table.schema.empty_table()
        return self.table.search().where(_among(ids)).select(_READ).to_arrow()


def _schema(dim: int, metric: str) -> pyarrow.Schema:
    arrow = import_extra("pyarrow", "lance")
    vector, text = arrow.list_(arrow.float32(), dim), arrow.string()
    types = {"place": arrow.int64(), "key": text, "id": text, "text": text, "metadata": text}
    types |= {"facts": arrow.list_(text), "vector": vector, "tokens": arrow.large_binary()}
    return arrow.schema(types | ({"direction": vector} if metric == "cosine" else {}))


def _about_row(about: dict[str, Any]) -> pyarrow.Table:
    return import_extra("pyarrow", "lance").table({"about": [json.dumps(about)]})


def _as_rows(entries: Entries, places: list[int], schema: pyarrow.Schema) -> pyarrow.Table:
    arrow = import_extra("pyarrow", "lance")
    columns: dict[str, Any] = {
        "place": places,
        "key": [key_of(name) for name in entries.ids],
        "id": [json.dumps(name) for name in entries.ids],
        "text": entries.texts,
        "metadata": [json.dumps(metadata) for metadata in entries.metadata],
        "facts": [facts_of(metadata) for metadata in entries.metadata],
        "tokens": pack_tokens(entries.tokens, len(entries)),
    }
    vectors = {"vector": entries.vectors, "direction": directions(entries.vectors.double()).float()}
    for name, values in vectors.items():
        flat = arrow.array(values.contiguous().view(-1).numpy())
        columns[name] = arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return arrow.table({field.name: columns[field.name] for field in schema}, schema=schema)


def _as_entries(rows: pyarrow.Table, dim: int) -> Entries:
    rows = rows.sort_by("place")
    flat = rows["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    vectors = torch.from_numpy(flat.copy()).view(-1, dim)
    ids, metadata = (tuple(map(json.loads, rows[name].to_pylist())) for name in ("id", "metadata"))
    return Entries(ids, tuple(rows["text"].to_pylist()), metadata, vectors, unpack_tokens(rows["tokens"].to_pylist()))


def _as_candidates(found: pyarrow.Table, count: int, dim: int) -> Candidates:
    """What was found, for each query, as entries that each stand there once."""
    places = found["place"].to_pylist()
    queries = found["query_index"].to_pylist() if "query_index" in found.column_names else [0] * len(places)
    once = {place: row for row, place in enumerate(places)}
    entries = _as_entries(found.take(list(once.values())).select(_READ), dim) if once else None
    number = {place: row for row, place in enumerate(sorted(once))}
    near: list[list[int]] = [[] for _ in range(count)]
    for query, place in zip(queries, places, strict=True):
        near[query].append(number[place])
    width = max(map(len, near))
    lines = [line + [-1] * (width - len(line)) for line in near]
    none = Entries((), (), (), torch.empty(0, dim))
    return Candidates(entries or none, torch.tensor(lines, dtype=torch.long).view(count, width))


def _among(ids: Sequence[Id]) -> str:
    return f"key IN ({_quoted([key_of(name) for name in ids])})"


def _quoted(digests: Sequence[str]) -> str:
    """Digests and UUIDs as literals: hexadecimal digits and hyphens, so that there is nothing to escape."""
    return ", ".join(f"'{digest}'" for digest in digests)
