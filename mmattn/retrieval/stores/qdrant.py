"""A store in a Qdrant collection: in this process, in a folder, or on a server.

A point has the UUID5 of the entry's id; "vector", and under the cosine "direction", the vector at length 1, which is
searched (Qdrant keeps vectors of the cosine at that length only); and as payload id, text, metadata, place, facts
(digests of metadata) and tokens in base64. One more point without a vector, which no search finds, describes the store.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.entries import Id
from mmattn.retrieval.scoring import directions
from mmattn.retrieval.stores.base import register_store
from mmattn.retrieval.stores.database import DatabaseStore, Row, facts_of

if TYPE_CHECKING:
    from qdrant_client import QdrantClient
    from qdrant_client.models import PointStruct, Record, ScoredPoint

_NAMES = uuid.uuid5(uuid.NAMESPACE_DNS, "mmattn")
#: The point that describes the store; no id of an entry is written like it in JSON.
ABOUT = str(uuid.uuid5(_NAMES, "about"))
#: Points of one request.
_POINTS = 256


@register_store("qdrant")
class QdrantStore(DatabaseStore):
    """A Qdrant collection.

    In this process Qdrant compares every entry, in float32; a server searches a graph, and may miss some of the best.
    A search sees changes as they arrive, one process at a time may change a collection, and a server that fails
    half-way keeps the half that it received.

    Args:
        dim: width e of the vectors.
        metric: "cosine", "ip" or "l2".
        location: ":memory:", the address of a server, or a folder, which one process at a time can open.
        client: your own client instead, which `close` leaves open.
        collection: its name.

    Raises:
        ConfigError: the collection exists.
        MissingExtraError: qdrant-client is not installed.
    """

    schemes = ("qdrant",)

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
                f"there is a collection {collection!r} already: open it with Index.open, give another name, or delete "
                "it with client.delete_collection"
            )
        models = qdrant().models
        distance = models.Distance.EUCLID if metric == "l2" else models.Distance.DOT
        vectors = {"vector": models.VectorParams(size=dim, distance=distance)}
        if metric == "cosine":
            no_graph = models.HnswConfigDiff(m=0)
            vectors["direction"] = vectors["vector"]
            vectors["vector"] = models.VectorParams(size=dim, distance=distance, on_disk=True, hnsw_config=no_graph)
        self.client.create_collection(collection, vectors_config=vectors)
        if not self._local:
            self.client.create_payload_index(collection, "facts", models.PayloadSchemaType.KEYWORD, wait=True)
        self._begin(dim, metric)

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """Return the settings in qdrant:http://host:6333/collection, or qdrant:FOLDER."""
        place = address.removeprefix("qdrant:")
        if "://" not in place:
            return {"location": place}
        url = urlsplit(place)
        before, _, collection = url.path.rstrip("/").rpartition("/")
        location = url._replace(path=before).geturl()
        return {"location": location, "collection": collection} if collection else {"location": location}

    @classmethod
    def connect(
        cls,
        location: str | os.PathLike[str] = ":memory:",
        *,
        client: QdrantClient | None = None,
        collection: str = "mmattn",
    ) -> QdrantStore:
        """Return a store over an existing collection."""
        store = cls.__new__(cls)
        store._use(location, client, collection)
        try:
            if not store.client.collection_exists(collection):
                names = sorted(one.name for one in store.client.get_collections().collections)
                raise IndexFileError(
                    f"there is no collection {collection!r}, only {names[:8]}; make one with Index.build(…, "
                    "store='qdrant', collection=…)"
                )
            store._resume(f"collection {collection!r}")
        except BaseException:
            store.close()
            raise
        return store

    def _use(self, location: str | os.PathLike[str], client: QdrantClient | None, collection: str) -> None:
        place = os.fspath(location)
        kind = "location" if place == ":memory:" else "url" if "://" in place else "path"
        options: dict[str, Any] = {kind: place}
        self.client: QdrantClient = qdrant().QdrantClient(**options) if client is None else client
        self.collection = collection
        self._owned = client is None
        options = self.client.init_options
        self._local = options["path"] is not None or options["location"] == ":memory:"
        # In this process Qdrant must not be read while it is written to.
        self._lock: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if self._local else contextlib.nullcontext()
        )

    @property
    def ids(self) -> tuple[Id, ...]:
        """Return all ids, in the order of adding."""
        payloads = [point.payload or {} for point in self._scroll(["id", "place"], False)]
        return tuple(payload["id"] for payload in sorted(payloads, key=lambda payload: payload["place"]))

    def __len__(self) -> int:
        with self._lock:
            return int(self.client.count(self.collection, exact=True).count) - 1

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self._lock:
            for keys in _batches([key_of(name) for name in ids]):
                self.client.delete(self.collection, qdrant().models.PointIdsList(points=keys), wait=True)

    def drop(self) -> None:
        """Delete the collection, and close."""
        self.client.delete_collection(self.collection)
        self.close()

    def close(self) -> None:
        """Close the client, unless it is your own."""
        if self._owned:
            self.client.close()

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock of this process; a server has no transactions of many requests."""
        return self._lock

    def _read_state(self) -> dict[str, Any]:
        points = self._retrieve([ABOUT])
        return dict(points[0].payload or {}) if points else {}

    def _write_state(self, state: dict[str, Any]) -> None:
        self._upsert([qdrant().models.PointStruct(id=ABOUT, vector={}, payload=state)])

    def _fetch(self, ids: Sequence[Id] | None) -> list[Row]:
        points = self._scroll(True, ["vector"]) if ids is None else self._retrieve([key_of(name) for name in ids])
        return [_as_row(point) for point in points]

    def _insert(self, rows: list[Row]) -> None:
        points = []
        for row in rows:
            _check_ints([row.id, row.metadata])
            payload = {"id": row.id, "text": row.text, "metadata": row.metadata, "place": row.place}
            payload["facts"] = facts_of(row.metadata)
            if row.tokens is not None:
                payload["tokens"] = base64.b64encode(row.tokens).decode()
            vectors = {"vector": row.vector.tolist()}
            if self.metric == "cosine":
                vectors["direction"] = directions(row.vector.double()).float().tolist()
            points.append(qdrant().models.PointStruct(id=key_of(row.id), vector=vectors, payload=payload))
        self._upsert(points)

    _replace = _insert

    def _upsert(self, points: list[PointStruct]) -> None:
        with self._lock:
            for part in _batches(points):
                self.client.upsert(self.collection, part, wait=True)

    def _retrieve(self, keys: list[str]) -> list[Record]:
        with self._lock:
            return [
                point
                for part in _batches(keys)
                for point in self.client.retrieve(self.collection, part, with_payload=True, with_vectors=["vector"])
            ]

    def _scroll(self, payload: bool | list[str], vectors: bool | list[str]) -> list[Record]:
        points: list[Record] = []
        offset: Any = None
        with self._lock:
            while True:
                page, offset = self.client.scroll(
                    self.collection, limit=1000, offset=offset, with_payload=payload, with_vectors=vectors
                )
                points += [point for point in page if str(point.id) != ABOUT]
                if offset is None:
                    return points

    def _nearest(self, queries: Tensor, count: int, facts: list[str]) -> list[list[Row]]:
        models, cosine = qdrant().models, self.metric == "cosine"
        must = [models.FieldCondition(key="facts", match=models.MatchValue(value=fact)) for fact in facts]
        shared = {"using": "direction" if cosine else "vector", "filter": models.Filter(must=must) if must else None}
        shared |= {"limit": count, "with_payload": True, "with_vector": ["vector"]}
        vectors = (directions(queries.double()) if cosine else queries).tolist()
        requests = [models.QueryRequest(query=vector, **shared) for vector in vectors]
        with self._lock:
            answers = [a for part in _batches(requests) for a in self.client.query_batch_points(self.collection, part)]
        return [[_as_row(point) for point in answer.points] for answer in answers]


def qdrant() -> Any:
    """Return the library, or raise an error that names the extra."""
    return import_extra("qdrant_client", "scale")


def key_of(name: Id) -> str:
    """Return the UUID of the point of an entry; 1 and "1" have two."""
    return str(uuid.uuid5(_NAMES, json.dumps(name)))


def _batches(values: list[Any]) -> Iterator[list[Any]]:
    return (values[start : start + _POINTS] for start in range(0, len(values), _POINTS))


def _as_row(point: Record | ScoredPoint) -> Row:
    payload: dict[str, Any] = point.payload or {}
    vectors: Any = point.vector
    tokens = payload.get("tokens")
    packed = None if tokens is None else base64.b64decode(tokens)
    vector = torch.tensor(vectors["vector"], dtype=torch.float32)
    return Row(payload["place"], payload["id"], payload.get("text"), payload.get("metadata"), vector, packed)


def _check_ints(value: object) -> None:
    """Refuse ints of more than 64 bits, which Qdrant would round."""
    if isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            _check_ints(one)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(f"ints in Qdrant have 64 bits, got {value!r:.80}; write it as text. Nothing was changed")
