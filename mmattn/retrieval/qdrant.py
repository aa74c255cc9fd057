"""QdrantIndex: the verbs of an index over the entries of a Qdrant collection, in this process or on a server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, IndexMismatchError, check_float, check_int
from mmattn.retrieval.collection import (
    ABOUT,
    about_point,
    as_entries,
    as_points,
    condition,
    connect,
    create,
    point_id,
    qdrant,
    read_about,
)
from mmattn.retrieval.entries import (
    Entries,
    Entry,
    Id,
    as_id_list,
    check_ids,
    check_known,
    check_metadata,
    check_texts,
)
from mmattn.retrieval.hits import Hits, found
from mmattn.retrieval.space import Encoder, Space
from mmattn.retrieval.vectors import best, directions, gather, score

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

_NUMBERS = 1 << 18  # of vectors, in one request


class QdrantIndex:
    """An index whose entries are in a Qdrant collection. What `Index` says of ids, scores, filters and errors holds.

    Made by `QdrantIndex.build`, found again by `QdrantIndex.open`. In this process, in memory or in a folder, Qdrant
    compares every entry; a server searches a graph, and may miss some of the best k. What it proposes is scored in
    float64 from the full vectors, as everywhere. A server of your own:

        docker run -p 6333:6333 -v "$PWD/qdrant:/qdrant/storage" qdrant/qdrant
        index = QdrantIndex.build(texts, encoder=encoder, location="http://localhost:6333")

    Unlike `Index` it keeps no encoded tokens, filters by dicts only, and has no versions: a search sees changes as they
    arrive, one process at a time may change a collection, and a server that fails half-way keeps the half it has.

    >>> index = QdrantIndex.build(torch.eye(3), ids=["x", "y", 1], metadata=[{"odd": True}, {"odd": False}, None])
    >>> index.search([0.1, 0.9, 0.2], 2).ids
    [['y', 1]]
    >>> index.search([0.1, 0.9, 0.2], 2, filter={"odd": True}).ids
    [['x', None]]
    """

    def __init__(self, client: QdrantClient, collection: str, space: Space) -> None:
        self.client = client
        self.collection = collection
        self.space = space
        self._writing = threading.RLock()

    @classmethod
    def build(
        cls,
        items: Any,
        *,
        encoder: Encoder | None = None,
        ids: Iterable[Id] | None = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Any] | None = None,
        metric: str = "cosine",
        location: str | os.PathLike[str] = ":memory:",
        client: QdrantClient | None = None,
        collection: str = "mmattn",
    ) -> QdrantIndex:
        """Make a collection and an index of it. Other arguments and errors as for `Index.build`.

        Args:
            location: ":memory:", the address of a server ("http://localhost:6333"), or a folder, which one process at a
                time can open: `index.client.close()` gives it free.
            client: one of your own instead, for keys, timeouts or gRPC.
            collection: its name.

        Raises:
            ConfigError: there is such a collection. MissingExtraError: qdrant-client is not installed.
        """
        space, items = Space.first(items, encoder, metric)
        client = connect(location) if client is None else client
        if client.collection_exists(collection):
            raise ConfigError(
                f"there is a collection {collection!r} already: open it with QdrantIndex.open, give another name, or "
                "delete it with client.delete_collection"
            )
        index = cls(client, collection, space)
        create(client, collection, space)
        try:
            index._write([about_point(space, 0, 0)])
            index.add(items, ids=ids, texts=texts, metadata=metadata)
        except BaseException:
            client.delete_collection(collection)
            raise
        return index

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str] = ":memory:",
        *,
        client: QdrantClient | None = None,
        collection: str = "mmattn",
        encoder: Encoder | None = None,
        metric: str | None = None,
    ) -> QdrantIndex:
        """Open a collection that `build` made.

        Args:
            location: as for `build`, and so are client and collection.
            encoder: what encodes texts; it must be the one the collection was built with.
            metric: the one the collection must have; None takes any.

        Raises:
            IndexFileError: there is no such collection, or `build` did not make it, or a newer version did.
            IndexMismatchError: another encoder, width or metric.
        """
        client = connect(location) if client is None else client
        if not client.collection_exists(collection):
            names = sorted(one.name for one in client.get_collections().collections)
            raise IndexFileError(
                f"there is no collection {collection!r}, only {names[:8]}; make one with QdrantIndex.build"
            )
        about = read_about(client, collection)
        if metric not in (None, about["metric"]):
            raise IndexMismatchError(f"collection {collection!r} has metric {about['metric']!r}, not {metric!r}")
        space = Space(about["dim"], about["metric"], None, about["encoder"])
        return cls(client, collection, space if encoder is None else space.joined(encoder))

    def __len__(self) -> int:
        return int(self.client.count(self.collection, exact=True).count) - 1

    def __contains__(self, name: object) -> bool:
        return bool(self.client.retrieve(self.collection, [point_id(name)], with_payload=False))

    def __getitem__(self, name: Id) -> Entry:
        return self._find([name])[0].entry(0)

    def __repr__(self) -> str:
        return f"QdrantIndex({len(self)} entries, e={self.dim}, {self.metric}, collection {self.collection!r})"

    @property
    def ids(self) -> tuple[Id, ...]:
        """The ids, in the order in which the entries were added; every one is fetched."""
        places, offset = {}, None
        while True:
            points, offset = self.client.scroll(
                self.collection, limit=1000, offset=offset, with_payload=["id", "place"], with_vectors=False
            )
            places.update({point.payload["id"]: point.payload["place"] for point in points if point.id != ABOUT})
            if offset is None:
                return tuple(sorted(places, key=places.__getitem__))

    @property
    def dim(self) -> int:
        """Width e of the vectors."""
        return self.space.dim

    @property
    def metric(self) -> str:
        """How vectors are compared."""
        return self.space.metric

    def add(
        self,
        items: Any,
        *,
        ids: Iterable[Id] | None = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Any] | None = None,
    ) -> tuple[Id, ...]:
        """Add entries and return their ids. Arguments and errors as for `build`; what is refused adds nothing."""
        vectors, texts = self.space.entries(items, texts)
        count = len(vectors)
        given = None if ids is None else check_ids(ids, count)
        texts = (None,) * count if texts is None else check_texts(texts, count, optional=True)
        metadata = (None,) * count if metadata is None else check_metadata(metadata, count)
        with self._writing:
            about = read_about(self.client, self.collection)
            next_id, next_place = about["next_id"], about["next_place"]
            named = tuple(range(next_id, next_id + count)) if given is None else given
            new = Entries(named, texts, metadata, vectors.cpu())
            self._fetch(named)[0].joined(new)  # refuses ids that are taken
            points = as_points(new, range(next_place, next_place + count), self.metric)
            next_id = max(next_id, 1 + max((name for name in named if isinstance(name, int)), default=-1))
            self._write([about_point(self.space, next_id, next_place + count), *points])
        return named

    def remove(self, ids: Iterable[Id]) -> None:
        """Remove entries, or none. Their ids stay free.

        Raises:
            IndexMismatchError: an id that is not in the index.
        """
        names = as_id_list(ids)
        models = qdrant().models
        with self._writing:
            self._find(names)
            for part in _batches([point_id(name) for name in names], 1000):
                self.client.delete(self.collection, models.PointIdsList(points=part), wait=True)

    def update(
        self,
        ids: Iterable[Id],
        items: Any = None,
        *,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Any] | None = None,
    ) -> None:
        """Replace what is given of entries; they keep their ids and their place. Arguments as for `build`.

        Raises:
            IndexMismatchError: an id that is not in the index, or another width. What is refused changes nothing.
        """
        names = as_id_list(ids)
        columns: dict[str, Any] = {}
        if items is not None:
            vectors, texts = self.space.entries(items, texts)
            if len(vectors) != len(names):
                raise IndexMismatchError(f"each entry needs one item: got {len(vectors)} items for {len(names)} ids")
            columns["vectors"] = vectors.cpu()
        if texts is not None:
            columns["texts"] = check_texts(texts, len(names), optional=True)
        if metadata is not None:
            columns["metadata"] = check_metadata(metadata, len(names))
        with self._writing:
            old, places = self._find(names)
            self._write(as_points(old.replaced(old.find(names), **columns), places, self.metric))

    def search(
        self,
        queries: Any,
        top_k: int,
        *,
        score_threshold: float | None = None,
        filter: Mapping[str, Any] | None = None,
        encoder: Encoder | None = None,
    ) -> Hits:
        """The entries that fit best, as `Index.search` finds and scores them; `filter` is a dict, and no function."""
        check_int("top_k", top_k)
        if score_threshold is not None:
            check_float("score_threshold", score_threshold)
        values = self.space.queries(queries, encoder, torch.device("cpu"))
        with torch.autocast("cpu", enabled=False):
            # As the engines of faiss do: more than k, since Qdrant compares in float32 and the true scores decide.
            proposed = self._propose(values.detach(), 2 * top_k + 32, condition(filter))
            entries, _ = as_entries([point for points in proposed for point in points], self.dim)
            candidates = torch.full((len(values), max(map(len, proposed), default=0)), -1)
            for row, points in zip(candidates, proposed, strict=True):
                names = [entries.rows[point.payload["id"]] for point in points]
                row[: len(points)] = torch.tensor(names, dtype=torch.long)
            rows = best(values.detach(), entries.vectors, candidates, self.metric, top_k)
            near = gather(entries.vectors, rows)
            hits = found(entries, rows, near, score(values, near, self.metric))
        return hits if score_threshold is None else hits.above(score_threshold)

    def _propose(self, queries: Tensor, count: int, only: Any) -> list[list[Any]]:
        """For each query (b, e) at most `count` points that probably fit best, of those a filter lets through."""
        models, cosine = qdrant().models, self.metric == "cosine"
        requests = [
            models.QueryRequest(
                query=query,
                using="direction" if cosine else "vector",
                filter=only,
                limit=count,
                with_payload=["id", "text", "metadata", "place"],
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
        for part in _batches([point_id(name) for name in names], _NUMBERS // self.dim):
            points += self.client.retrieve(self.collection, part, with_payload=True, with_vectors=["vector"])
        return as_entries(points, self.dim)

    def _find(self, names: Sequence[Id]) -> tuple[Entries, list[int]]:
        """Entries and their places; ids that are not there, or given twice, are refused."""
        entries, places = self._fetch(names)
        check_known(names, entries.rows if all(name in entries.rows for name in names) else self.ids)
        return entries, places

    def _write(self, points: list[Any]) -> None:
        for part in _batches(points, _NUMBERS // self.dim):
            self.client.upsert(self.collection, part, wait=True)


def _batches(values: list[Any], size: int) -> Iterator[list[Any]]:
    size = max(1, size)
    return (values[start : start + size] for start in range(0, len(values), size))
