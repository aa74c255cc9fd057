"""A store in a shard of Qdrant's engine, in this process and a folder; points are as in `qdrant_points`."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.stores.base import register_store
from mmattn.retrieval.stores.qdrant_points import PointStore, condition
from mmattn.storage.files import lock_folder


@register_store("qdrant-edge")
class QdrantEdgeStore(PointStore):
    """A shard of the engine of Qdrant's server, in this process. A search compares every entry.

    Each change is one entry of the engine's log: all or none. One process at a time can open a shard, and its threads
    take turns.

    Args:
        dim: width e of the vectors.
        metric: "cosine", "ip" or "l2".
        path: an empty or new folder; None is a temporary one.

    Raises:
        ConfigError: the folder is not empty.
        IndexFileError: another process has it open.
        MissingExtraError: qdrant-edge-py is not installed.
    """

    schemes = ("qdrant-edge",)

    def __init__(self, dim: int, metric: str, *, path: str | os.PathLike[str] | None = None) -> None:
        library = edge()
        temporary = tempfile.mkdtemp(prefix="mmattn-") if path is None else None
        folder = temporary or os.fspath(path or "")
        if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
            raise ConfigError(
                f"{folder!r} is not empty: open an existing index with Index.open('qdrant-edge:{folder}'), or name "
                "another folder"
            )
        os.makedirs(folder, exist_ok=True)
        self._use(folder, temporary)
        distance = library.Distance.Euclid if metric == "l2" else library.Distance.Dot
        names = ("vector", "direction") if metric == "cosine" else ("vector",)
        vectors = {name: library.EdgeVectorParams(size=dim, distance=distance) for name in names}
        try:
            self._shard = library.EdgeShard.create(folder, library.EdgeConfig(vectors=vectors))
            self._closing.callback(self._shard.close)
            keyword = library.PayloadSchemaType.Keyword
            self._shard.update(library.UpdateOperation.create_field_index("facts", keyword))
            self._begin(dim, metric)
        except BaseException:
            self.drop()
            raise

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """Return the settings in qdrant-edge:FOLDER."""
        return {"path": address.removeprefix("qdrant-edge:")}

    @classmethod
    def connect(cls, *, path: str | os.PathLike[str]) -> QdrantEdgeStore:
        """Return a store over an existing shard."""
        library, folder = edge(), os.fspath(path)
        if not os.path.isdir(folder) or not os.listdir(folder):
            raise IndexFileError(
                f"there is no index of Qdrant in {folder!r}; make one with Index.build(…, store='qdrant-edge', path=…)"
            )
        store = cls.__new__(cls)
        store._use(folder, None)
        try:
            try:
                store._shard = library.EdgeShard.load(folder)
            except Exception as error:
                raise IndexFileError(f"what lies in {folder!r} is not a shard of Qdrant: {error}") from error
            store._closing.callback(store._shard.close)
            store._resume(f"the shard in {folder!r}")
        except BaseException:
            store.close()
            raise
        return store

    def _use(self, folder: str, temporary: str | None) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._closing = contextlib.ExitStack()
        weakref.finalize(self, self._closing.close)
        if temporary is not None:
            self._closing.callback(shutil.rmtree, temporary, ignore_errors=True)
        try:
            self._closing.enter_context(lock_folder(folder, wait=False))
        except BlockingIOError as error:
            raise IndexFileError(
                f"another process, or another store of this one, has the shard in {folder!r} open, and one at a time "
                "can: close it there, or use a server"
            ) from error

    def __len__(self) -> int:
        with self._lock:
            return int(self._shard.count(edge().CountRequest(exact=True))) - 1

    def drop(self) -> None:
        """Close, and delete the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the shard, so that another process can open it."""
        self._closing.close()

    def _point(self, key: str, vectors: Mapping[str, list[float]], payload: Mapping[str, Any]) -> Any:
        return edge().Point(id=key, vector=vectors, payload=payload)

    def _upsert(self, points: list[Any]) -> None:
        self._shard.update(edge().UpdateOperation.upsert_points(points))

    def _remove(self, keys: list[str]) -> None:
        self._shard.update(edge().UpdateOperation.delete_points(keys))

    def _retrieve(self, keys: list[str]) -> list[Any]:
        points: list[Any] = self._shard.retrieve(keys, with_payload=True, with_vector=["vector"])
        return points

    def _page(self, payload: Any, vectors: Any, offset: Any) -> tuple[list[Any], Any]:
        request = edge().ScrollRequest(offset=offset, limit=1000, with_payload=payload, with_vector=vectors)
        points, offset = self._shard.scroll(request)
        return points, offset

    def _query(self, vectors: list[list[float]], name: str, count: int, facts: list[str]) -> list[list[Any]]:
        library = edge()
        shared = {"filter": condition(facts, library), "limit": count, "with_payload": True, "with_vector": ["vector"]}
        nearest = library.Query.Nearest
        requests = [library.QueryRequest(query=nearest(vector, using=name), **shared) for vector in vectors]
        answers: list[list[Any]] = self._shard.query_batch(library.QueryBatchRequest(requests))
        return answers


def edge() -> Any:
    """Return the library, or raise an error that names the extra."""
    return import_extra("qdrant_edge", "qdrant-edge")
