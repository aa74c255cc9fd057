"""A store whose entries are in a shard of Qdrant's engine in this process, in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, import_extra
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
    check_about,
    condition,
)
from mmattn.retrieval.stores.registry import register_store
from mmattn.retrieval.stores.store_state import key_of
from mmattn.storage.files import lock_folder

_DISTANCES = {"cosine": "Dot", "ip": "Dot", "l2": "Euclid"}
_SCROLLED = 1000


@register_store("qdrant-edge")
class QdrantEdgeStore:
    """A shard of the engine that runs in Qdrant's server, here in this process: a search compares every entry.

    Each change is one entry of the engine's log: all or none. One process at a time has a shard open, and threads of it
    take turns.

    Args:
        dim: width e of the vectors.
        metric: how they are compared.
        path: an empty or new folder; None is one that ends with this store.

    Raises:
        ConfigError: there is a shard, or something else.
        IndexFileError: another process has it open.
        MissingExtraError: qdrant-edge-py is not installed.
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 0.99
    holds_tokens: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("qdrant-edge",)

    def __init__(self, dim: int, metric: str, *, path: str | os.PathLike[str] | None = None) -> None:
        library = edge()
        temporary = tempfile.mkdtemp(prefix="mmattn-") if path is None else None
        folder = temporary or os.fspath(path or "")
        if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
            raise ConfigError(
                f"{folder!r} is not empty: open an index that is there with Index.open('qdrant-edge:{folder}'), or "
                "name another folder"
            )
        os.makedirs(folder, exist_ok=True)
        self._use(folder, temporary)
        self.dim, self.metric = dim, metric
        searched = library.EdgeVectorParams(size=dim, distance=getattr(library.Distance, _DISTANCES[metric]))
        plain = library.EdgeVectorParams(size=dim, distance=library.Distance.Dot)
        # As on a server: beside the vector as it was given lies the one at length 1, which is what is searched.
        vectors = {"vector": plain, "direction": searched} if metric == "cosine" else {"vector": searched}
        try:
            self._shard = library.EdgeShard.create(folder, library.EdgeConfig(vectors=vectors))
            self._closing.callback(self._shard.close)
            keyword = library.PayloadSchemaType.Keyword
            self._shard.update(library.UpdateOperation.create_field_index("facts", keyword))
            self._upsert([self._about_point({"encoder": None, "next_id": 0, "next_place": 0})])
        except BaseException:
            self.drop()
            raise

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """The settings that an address names: qdrant-edge:FOLDER.

        Args:
            address: a folder.
        """
        return {"path": address.removeprefix("qdrant-edge:")}

    @classmethod
    def connect(cls, *, path: str | os.PathLike[str]) -> QdrantEdgeStore:
        """A store over a shard that is there.

        Args:
            path: its folder.

        Raises:
            IndexFileError: there is no shard, it was made by something else or by another version, or another process
                has it open.
        """
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
            about = store._read_about()
            store.dim, store.metric = about["dim"], about["metric"]
        except BaseException:
            store.close()
            raise
        return store

    def _use(self, folder: str, temporary: str | None) -> None:
        self.folder = folder
        self._alone = threading.RLock()
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

    @property
    def settings(self) -> dict[str, Any]:
        """None: what was saved is a copy, which is opened in a folder of its own."""
        return {}

    @property
    def about(self) -> dict[str, Any]:
        """The encoder and the next id."""
        about = self._read_about()
        return {"encoder": about["encoder"], "next_id": about["next_id"]}

    @about.setter
    def about(self, about: dict[str, Any]) -> None:
        with self._alone:
            self._upsert([self._about_point({**self._read_about(), **about})])

    @property
    def ids(self) -> tuple[Id, ...]:
        """All ids, in the order in which the entries were added; every one is read."""
        points = self._scroll(["id", "place"], False)
        points.sort(key=lambda point: point.payload["place"])
        return tuple(point.payload["id"] for point in points)

    def __len__(self) -> int:
        with self._alone:
            return int(self._shard.count(edge().CountRequest(exact=True))) - 1

    def get(self, ids: Sequence[Id]) -> Entries:
        """The entries of those of these ids that are here."""
        return self._fetch(ids)[0]

    def one(self) -> Entries:
        """One entry, or none."""
        with self._alone:
            request = edge().ScrollRequest(limit=2, with_payload=PAYLOAD, with_vector=["vector"])
            points, _ = self._shard.scroll(request)
        return self._as_entries([point for point in points if str(point.id) != ABOUT][:1])[0]

    def add(self, entries: Entries) -> None:
        """Add entries after those that are here."""
        with self._alone:
            about = self._read_about()
            first, end = about["next_place"], about["next_place"] + len(entries)
            points = as_points(entries, range(first, end), self.metric, edge().Point)
            self._upsert([self._about_point({**about, "next_place": end}), *points])

    def update(self, entries: Entries) -> None:
        """Replace entries."""
        with self._alone:
            old, places = self._fetch(entries.ids)
            place = dict(zip(old.ids, places, strict=True))
            self._upsert(as_points(entries, [place[name] for name in entries.ids], self.metric, edge().Point))

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self._alone:
            self._shard.update(edge().UpdateOperation.delete_points([key_of(name) for name in ids]))

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """What the engine finds, somewhat more than was asked for, since it compares in float32."""
        library, cosine = edge(), self.metric == "cosine"
        only = condition(filter, library)
        requests = [
            library.QueryRequest(
                query=library.Query.Nearest(query, using="direction" if cosine else "vector"),
                filter=only,
                limit=2 * top_k + 32,
                with_payload=PAYLOAD,
                with_vector=["vector"],
            )
            for query in (directions(queries.double()) if cosine else queries).tolist()
        ]
        with self._alone:
            found = self._shard.query_batch(library.QueryBatchRequest(requests)) if requests else []
        entries, _ = self._as_entries([point for points in found for point in points])
        rows = torch.full((len(queries), max(map(len, found), default=0)), -1)
        for row, points in zip(rows, found, strict=True):
            row[: len(points)] = torch.tensor([entries.rows[point.payload["id"]] for point in points], dtype=torch.long)
        return Candidates(entries, rows)

    def save(self, folder: str) -> None:
        """Write a copy of all entries."""
        write_entries(folder, self._as_entries(self._scroll(PAYLOAD, ["vector"]))[0])

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> QdrantEdgeStore:
        """What `save` wrote, in a folder that ends with the store."""
        entries = read_copy(folder, dim, metric, mapped)
        store = cls(dim, metric, **settings)
        if len(entries):
            store.add(entries)
        return store

    def drop(self) -> None:
        """Close, and delete the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the shard; another process can open it then."""
        self._closing.close()

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """No search of another thread comes between."""
        return self._alone

    def _about_point(self, about: dict[str, Any]) -> Any:
        return about_point({"dim": self.dim, "metric": self.metric, **about}, edge().Point)

    def _read_about(self) -> dict[str, Any]:
        with self._alone:
            return check_about(self._shard.retrieve([ABOUT], with_payload=True, with_vector=False), self.folder)

    def _as_entries(self, points: Sequence[Any]) -> tuple[Entries, list[int]]:
        return as_entries(points, self.dim)

    def _fetch(self, names: Sequence[Id]) -> tuple[Entries, list[int]]:
        with self._alone:
            keys = [key_of(name) for name in names]
            return self._as_entries(self._shard.retrieve(keys, with_payload=True, with_vector=["vector"]))

    def _scroll(self, payload: list[str], vectors: Any) -> list[Any]:
        found, offset = [], None
        with self._alone:
            while True:
                request = edge().ScrollRequest(
                    offset=offset, limit=_SCROLLED, with_payload=payload, with_vector=vectors
                )
                points, offset = self._shard.scroll(request)
                found += [point for point in points if str(point.id) != ABOUT]
                if offset is None:
                    return found

    def _upsert(self, points: list[Any]) -> None:
        self._shard.update(edge().UpdateOperation.upsert_points(points))


def edge() -> Any:
    """The library, or a message which extra brings it."""
    return import_extra("qdrant_edge", "qdrant-edge")
