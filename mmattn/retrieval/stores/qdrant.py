"""A store in a Qdrant collection: in this process, in a folder, or on a server."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.stores.base import register_store
from mmattn.retrieval.stores.qdrant_points import PointStore, condition

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

#: Numbers of vectors in one request.
_NUMBERS = 1 << 18


@register_store("qdrant")
class QdrantStore(PointStore):
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
        self._lock = threading.RLock() if self._local else contextlib.nullcontext()

    def __len__(self) -> int:
        with self._lock:
            return int(self.client.count(self.collection, exact=True).count) - 1

    def drop(self) -> None:
        """Delete the collection, and close."""
        self.client.delete_collection(self.collection)
        self.close()

    def close(self) -> None:
        """Close the client, unless it is your own."""
        if self._owned:
            self.client.close()

    def _point(self, key: str, vectors: Mapping[str, list[float]], payload: Mapping[str, Any]) -> Any:
        return qdrant().models.PointStruct(id=key, vector=vectors, payload=payload)

    def _upsert(self, points: list[Any]) -> None:
        for part in _batches(points, _NUMBERS // self.dim):
            self.client.upsert(self.collection, part, wait=True)

    def _remove(self, keys: list[str]) -> None:
        for part in _batches(keys, 1000):
            self.client.delete(self.collection, qdrant().models.PointIdsList(points=part), wait=True)

    def _retrieve(self, keys: list[str]) -> list[Any]:
        return [
            point
            for part in _batches(keys, 1000)
            for point in self.client.retrieve(self.collection, part, with_payload=True, with_vectors=["vector"])
        ]

    def _page(self, payload: Any, vectors: Any, offset: Any) -> tuple[list[Any], Any]:
        return self.client.scroll(
            self.collection, limit=1000, offset=offset, with_payload=payload, with_vectors=vectors
        )

    def _query(self, vectors: list[list[float]], name: str, count: int, facts: list[str]) -> list[list[Any]]:
        models = qdrant().models
        shared = {"using": name, "filter": condition(facts, models), "limit": count}
        shared |= {"with_payload": True, "with_vector": ["vector"]}
        requests = [models.QueryRequest(query=vector, **shared) for vector in vectors]
        return [
            answer.points
            for part in _batches(requests, _NUMBERS // (count * self.dim))
            for answer in self.client.query_batch_points(self.collection, part)
        ]


def qdrant() -> Any:
    """Return the library, or raise an error that names the extra."""
    return import_extra("qdrant_client", "scale")


def _batches(values: list[Any], size: int) -> Iterator[list[Any]]:
    size = max(1, size)
    return (values[start : start + size] for start in range(0, len(values), size))
