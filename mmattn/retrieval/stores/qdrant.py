"""A store in a Qdrant collection: in this process, in a folder, or on a server.

A point has the UUID5 of the entry's id; "vector", and under the cosine "direction", the vector at length 1, which is
searched (Qdrant keeps vectors of the cosine at that length only); and as payload place, id and metadata as JSON, text,
facts (digests of metadata) and tokens in base64. One more point without a vector, which no search finds, describes the
store.
"""

from __future__ import annotations

import atexit
import base64
import os
import threading
import uuid
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from mmattn.errors import IndexFileError, import_extra
from mmattn.retrieval.stores import register_store
from mmattn.retrieval.stores.database import DatabaseStore, Row, State

if TYPE_CHECKING:
    from qdrant_client import QdrantClient
    from qdrant_client.models import Record, ScoredPoint

Value = TypeVar("Value")

_NAMES = uuid.uuid5(uuid.NAMESPACE_DNS, "mmattn")
#: The point that describes the store; no id of an entry is written like it in JSON.
ABOUT = str(uuid.uuid5(_NAMES, "about"))
#: Points of one request: a server limits the bytes.
_POINTS = 256
#: The client of each folder that is open in this process: Qdrant allows one.
_FOLDERS: WeakValueDictionary[str, QdrantClient] = WeakValueDictionary()
#: The stores of each client, and the lock they share: in this process Qdrant must not be read while it is written to.
_STORES: WeakKeyDictionary[QdrantClient, tuple[threading.RLock, WeakSet[QdrantStore]]] = WeakKeyDictionary()
_OPENING = threading.Lock()


@register_store("qdrant")
class QdrantStore(DatabaseStore):
    """A Qdrant collection.

    In this process Qdrant compares every entry, in float32; a server searches a graph, and may miss some of the best.
    A search sees changes as they arrive, one process at a time may change a collection, and a server that fails
    half-way keeps the half that it received.

    Args:
        location: ":memory:", the address of a server, or a folder, which one process at a time can open; its stores
            share a client.
        client: your own client instead, which `close` leaves open.
        collection: its name.

    Raises:
        ConfigError: the collection exists.
        IndexFileError: another process has opened the folder.
        MissingExtraError: qdrant-client is not installed.
    """

    schemes = ("qdrant",)

    def __init__(
        self,
        dim: int | None,
        metric: str,
        *,
        location: str | os.PathLike[str] = ":memory:",
        client: QdrantClient | None = None,
        collection: str = "mmattn",
    ) -> None:
        self._library = import_extra("qdrant_client", "scale")
        self.collection, self._owned = collection, client is None
        with _OPENING:
            self.client: QdrantClient = self._connected(os.fspath(location)) if client is None else client
            self._lock, self._stores = _STORES.setdefault(self.client, (threading.RLock(), WeakSet()))
            self._stores.add(self)
        self.place = f"collection {collection!r}"
        super().__init__(dim, metric)

    def _connected(self, place: str) -> QdrantClient:
        """Return a client, for a folder that is open in this process the one that it has."""
        if place == ":memory:" or "://" in place:
            return self._library.QdrantClient(**{"location" if place == ":memory:" else "url": place})
        folder, refused = os.path.realpath(place), False
        client = _FOLDERS.get(folder)
        if client is None or client not in _STORES:  # closed
            with warnings.catch_warnings():  # a client that is refused leaves its lock file open
                warnings.simplefilter("ignore", ResourceWarning)
                try:
                    client = _FOLDERS[folder] = self._library.QdrantClient(path=place)
                except RuntimeError:
                    refused = True
        if refused:
            raise IndexFileError(f"{place!r} is open in another process: close it there, or use a Qdrant server")
        return client

    @classmethod
    def settings_of(cls, address: str) -> dict[str, str]:
        """Return the settings in qdrant:http://host:6333/collection, or qdrant:FOLDER."""
        place = address.removeprefix("qdrant:")
        if "://" not in place:
            return {"location": place}
        url = urlsplit(place)
        before, _, collection = url.path.rstrip("/").rpartition("/")
        location = url._replace(path=before).geturl()
        return {"location": location, "collection": collection} if collection else {"location": location}

    def _exists(self) -> bool:
        return self.client.collection_exists(self.collection)

    def _create(self) -> None:
        models = self._library.models
        distance = models.Distance.EUCLID if self.metric == "l2" else models.Distance.DOT
        vectors = {"vector": models.VectorParams(size=self.dim, distance=distance)}
        if self.metric == "cosine":
            vectors["direction"] = vectors["vector"]
            not_searched = {"on_disk": True, "hnsw_config": models.HnswConfigDiff(m=0)}
            vectors["vector"] = models.VectorParams(size=self.dim, distance=distance, **not_searched)
        self.client.create_collection(self.collection, vectors_config=vectors)
        options = self.client.init_options
        if options["path"] is None and options["location"] != ":memory:":
            self.client.create_payload_index(self.collection, "facts", models.PayloadSchemaType.KEYWORD, wait=True)

    def __len__(self) -> int:
        with self._lock:
            return int(self.client.count(self.collection, exact=True).count) - 1

    def drop(self) -> None:
        """Delete the collection, and close."""
        self.client.delete_collection(self.collection)
        self.close()

    def close(self) -> None:
        """Close the client, unless it is your own or other stores use it."""
        with _OPENING:
            self._stores.discard(self)
            if self._owned and not self._stores:
                self.client.close()
                _STORES.pop(self.client, None)

    def _ids(self) -> list[str]:
        payloads = [point.payload or {} for point in self._scroll(["id", "place"], False)]
        return [payload["id"] for payload in sorted(payloads, key=lambda payload: int(payload["place"]))]

    def _delete(self, ids: list[str]) -> None:
        for keys in _batches([_key(name) for name in ids]):
            self.client.delete(self.collection, self._library.models.PointIdsList(points=keys), wait=True)

    def _read_state(self) -> State:
        points = self.client.retrieve(self.collection, [ABOUT])
        return cast(State, points[0].payload or {}) if points else {}

    def _write_state(self, state: State) -> None:
        self.client.upsert(self.collection, [self._library.models.PointStruct(id=ABOUT, vector={}, payload=state)])

    def _fetch(self, ids: list[str] | None) -> list[Row]:
        if ids is None:
            return [_as_row(point) for point in self._scroll(True, ["vector"])]
        return [
            _as_row(point)
            for keys in _batches([_key(name) for name in ids])
            for point in self.client.retrieve(self.collection, keys, with_vectors=["vector"])
        ]

    def _insert(self, rows: list[Row]) -> None:
        points = []
        for row in rows:
            payload = row._asdict() | {"tokens": row.tokens and base64.b64encode(row.tokens).decode()}
            vectors = {"vector": payload.pop("vector").tolist()}
            if self.metric == "cosine":
                vectors["direction"] = row.direction.tolist()
            points.append(self._library.models.PointStruct(id=_key(row.id), vector=vectors, payload=payload))
        self.client.upload_points(self.collection, points, batch_size=_POINTS, wait=True)

    _replace = _insert

    def _scroll(self, payload: bool | list[str], vectors: bool | list[str]) -> list[Record]:
        points: list[Record] = []
        offset = None
        while True:
            page, offset = self.client.scroll(
                self.collection, limit=1000, offset=offset, with_payload=payload, with_vectors=vectors
            )
            points += [point for point in page if str(point.id) != ABOUT]
            if offset is None:
                return points

    def _nearest(self, queries: Tensor, count: int, facts: list[list[str]]) -> list[list[Row]]:
        models = self._library.models
        must = [models.FieldCondition(key="facts", match=models.MatchAny(any=part)) for part in facts]
        requests = [
            models.QueryRequest(
                query=query,
                using="direction" if self.metric == "cosine" else "vector",
                filter=models.Filter(must=must) if must else None,
                limit=count,
                with_payload=True,
                with_vector=["vector"],
            )
            for query in queries.tolist()
        ]
        return [
            [_as_row(point) for point in answer.points]
            for batch in _batches(requests)
            for answer in self.client.query_batch_points(self.collection, batch)
        ]


@atexit.register
def _close_folders() -> None:
    """Close the clients of folders while modules that they import are there."""
    for client in list(_FOLDERS.values()):
        client.close()


def _key(name: str) -> str:
    """Return the UUID of the point of an entry."""
    return str(uuid.uuid5(_NAMES, name))


def _batches(values: list[Value]) -> Iterator[list[Value]]:
    return (values[start : start + _POINTS] for start in range(0, len(values), _POINTS))


def _as_row(point: Record | ScoredPoint) -> Row:
    payload: dict[str, Any] = point.payload or {}
    tokens = payload["tokens"] and base64.b64decode(payload["tokens"])
    vector = torch.tensor(cast(dict[str, list[float]], point.vector)["vector"], dtype=torch.float32)
    return Row(payload["place"], payload["id"], payload["text"], payload["metadata"], tokens, vector)
