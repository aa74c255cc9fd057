"""A store whose entries are in a Qdrant collection: in this process, in a folder, or on a server."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError
from mmattn.retrieval.entries import Entries, Filter, Id
from mmattn.retrieval.scoring import directions
from mmattn.retrieval.stores.base import Candidates
from mmattn.retrieval.stores.entry_files import read_copy, write_entries
from mmattn.retrieval.stores.qdrant_points import (
    ABOUT,
    PAYLOAD,
    about_point,
    as_entries,
    as_points,
    condition,
    connect,
    create,
    is_local,
    qdrant,
    read_about,
)
from mmattn.retrieval.stores.registry import register_store
from mmattn.retrieval.stores.store_state import key_of

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

_NUMBERS = 1 << 18  # of vectors, in one request


@register_store("qdrant")
class QdrantStore:
    """A Qdrant collection, which this makes and `connect` finds again.

    In this process Qdrant compares every entry, in float32; a server searches a graph, and may miss some of the best.
    A search sees changes as they arrive, one process at a time may change a collection, and a server that fails
    half-way has the half that reached it.

    Args:
        dim: width e of the vectors.
        metric: how they are compared.
        location: ":memory:", the address of a server, or a folder, which one process at a time can open.
        client: one of your own instead, which `close` leaves open.
        collection: its name.

    Raises:
        ConfigError: there is such a collection.
        MissingExtraError: qdrant-client is not installed.
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 0.99
    holds_tokens: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("qdrant",)

    def __init__(
        self,
        dim: int,
        metric: str,
        *,
        location: str | os.PathLike[str] = ":memory:",
        client: QdrantClient | None = None,
        collection: str = "mmattn",
    ) -> None:
        self._use(location, client, collection)
        if self.client.collection_exists(collection):
            self.close()
            raise ConfigError(
                f"there is a collection {collection!r} already: open it with QdrantIndex.open, give another name, or "
                "delete it with client.delete_collection"
            )
        self.dim, self.metric = dim, metric
        create(self.client, collection, dim, metric)
        new = {"dim": dim, "metric": metric, "encoder": None, "next_id": 0, "next_place": 0}
        self._write([self._about_point(new)])

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """The settings that an address names: qdrant:http://host:6333/collection, or qdrant:FOLDER.

        Args:
            address: of a server with the collection as its path, or of a folder; without a path it is "mmattn".
        """
        place = address.removeprefix("qdrant:")
        url = urlsplit(place) if "://" in place else None
        if url is None:
            return {"location": place}
        *before, collection = url.path.rstrip("/").split("/") if url.path.strip("/") else ["", ""]
        location = url._replace(path="/".join(before)).geturl()
        return {"location": location, "collection": collection} if collection else {"location": location}

    @classmethod
    def connect(
        cls,
        location: str | os.PathLike[str] = ":memory:",
        *,
        client: QdrantClient | None = None,
        collection: str = "mmattn",
    ) -> QdrantStore:
        """A store over a collection that is there.

        Args:
            location: as for a new one.
            client: as for a new one.
            collection: its name.

        Raises:
            IndexFileError: there is no such collection, or it was made by something else or a newer version.
        """
        store = cls.__new__(cls)
        store._use(location, client, collection)
        try:
            if not store.client.collection_exists(collection):
                names = sorted(one.name for one in store.client.get_collections().collections)
                raise IndexFileError(
                    f"there is no collection {collection!r}, only {names[:8]}; make one with Index.build(…, "
                    "store='qdrant', collection=…) or QdrantIndex.build"
                )
            about = read_about(store.client, collection)
        except BaseException:
            store.close()
            raise
        store.dim, store.metric = about["dim"], about["metric"]
        return store

    def _use(self, location: str | os.PathLike[str], client: QdrantClient | None, collection: str) -> None:
        self.client = connect(location) if client is None else client
        self.collection = collection
        self._owned = client is None
        # A server serves many at once; in this process Qdrant must not be read while it is written to.
        local = is_local(self.client)
        self._alone: contextlib.AbstractContextManager[Any] = threading.RLock() if local else contextlib.nullcontext()

    @property
    def settings(self) -> dict[str, Any]:
        """None: what was saved is a copy, which is opened in memory."""
        return {}

    @property
    def about(self) -> dict[str, Any]:
        """The encoder and the next id, as the collection says now."""
        about = self._about()
        return {"encoder": about["encoder"], "next_id": about["next_id"]}

    @about.setter
    def about(self, about: dict[str, Any]) -> None:
        self._write([self._about_point({**self._about(), **about})])

    @property
    def ids(self) -> tuple[Id, ...]:
        """All ids, in the order in which the entries were added; every one is fetched."""
        places: dict[Id, int] = {}
        offset: Any = None
        with self._alone:
            while True:
                points, offset = self.client.scroll(
                    self.collection, limit=1000, offset=offset, with_payload=["id", "place"], with_vectors=False
                )
                places |= {point.payload["id"]: point.payload["place"] for point in points if point.id != ABOUT}
                if offset is None:
                    break
        return tuple(sorted(places, key=places.__getitem__))

    def __len__(self) -> int:
        with self._alone:
            return int(self.client.count(self.collection, exact=True).count) - 1

    def get(self, ids: Sequence[Id]) -> Entries:
        """The entries of those of these ids that are here."""
        return self._fetch(ids)[0]

    def add(self, entries: Entries) -> None:
        """Add entries after those that are here."""
        about = self._about()
        first, end = about["next_place"], about["next_place"] + len(entries)
        points = as_points(entries, range(first, end), self.metric, qdrant().models.PointStruct)
        self._write([self._about_point({**about, "next_place": end}), *points])

    def update(self, entries: Entries) -> None:
        """Replace entries."""
        old, places = self._fetch(entries.ids)
        place = dict(zip(old.ids, places, strict=True))
        places = [place[name] for name in entries.ids]
        self._write(as_points(entries, places, self.metric, qdrant().models.PointStruct))

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self._alone:
            for part in _batches([key_of(name) for name in ids], 1000):
                self.client.delete(self.collection, qdrant().models.PointIdsList(points=part), wait=True)

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """What Qdrant finds, somewhat more than was asked for, since it compares in float32."""
        only = condition(filter, qdrant().models)
        with self._alone:
            found = self._query(queries, 2 * top_k + 32, only)
        entries, _ = as_entries([point for points in found for point in points], self.dim)
        rows = torch.full((len(queries), max(map(len, found), default=0)), -1)
        for row, points in zip(rows, found, strict=True):
            row[: len(points)] = torch.tensor([entries.rows[point.payload["id"]] for point in points], dtype=torch.long)
        return Candidates(entries, rows)

    def save(self, folder: str) -> None:
        """Write a copy of all entries."""
        write_entries(folder, self.get(self.ids))

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> QdrantStore:
        """A collection in the memory of this process with what `save` wrote."""
        entries = read_copy(folder, dim, metric, mapped)
        store = cls(dim, metric, **settings)
        if len(entries):
            store.add(entries)
        return store

    def close(self) -> None:
        """Close the client, unless it was given."""
        if self._owned:
            self.client.close()

    def drop(self) -> None:
        """Delete the collection, and close."""
        self.client.delete_collection(self.collection)
        self.close()

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """In this process no search comes between; a server knows no transactions of many requests."""
        return self._alone

    def one(self) -> Entries:
        """One entry, or none."""
        with self._alone:
            points, _ = self.client.scroll(self.collection, limit=2, with_payload=PAYLOAD, with_vectors=["vector"])
        return as_entries([point for point in points if point.id != ABOUT][:1], self.dim)[0]

    def _about_point(self, about: dict[str, Any]) -> Any:
        return about_point(about, qdrant().models.PointStruct)

    def _about(self) -> dict[str, Any]:
        with self._alone:
            return read_about(self.client, self.collection)

    def _query(self, queries: Tensor, count: int, only: Any) -> list[list[Any]]:
        """For each query (b, e) at most `count` points that probably fit best, of those a filter allows."""
        models, cosine = qdrant().models, self.metric == "cosine"
        requests = [
            models.QueryRequest(
                query=query,
                using="direction" if cosine else "vector",
                filter=only,
                limit=count,
                with_payload=PAYLOAD,
                with_vector=["vector"],
            )
            for query in (directions(queries.double()) if cosine else queries).tolist()
        ]
        answers: list[list[Any]] = []
        for part in _batches(requests, _NUMBERS // (count * self.dim)):
            answers += [answer.points for answer in self.client.query_batch_points(self.collection, part)]
        return answers

    def _fetch(self, names: Sequence[Id]) -> tuple[Entries, list[int]]:
        points: list[Any] = []
        with self._alone:
            for part in _batches([key_of(name) for name in names], _NUMBERS // self.dim):
                points += self.client.retrieve(self.collection, part, with_payload=True, with_vectors=["vector"])
        return as_entries(points, self.dim)

    def _write(self, points: list[Any]) -> None:
        with self._alone:
            for part in _batches(points, _NUMBERS // self.dim):
                self.client.upsert(self.collection, part, wait=True)


def _batches(values: list[Any], size: int) -> Iterator[list[Any]]:
    size = max(1, size)
    return (values[start : start + size] for start in range(0, len(values), size))
