"""Entries as points of Qdrant, in a collection or a shard.

A point has the UUID5 of the entry's id; "vector", and under the cosine "direction", the vector at length 1, which is
searched (Qdrant keeps vectors of the cosine at that length only); and as payload id, text, metadata, place, facts
(digests of metadata) and tokens in base64. One more point without a vector, which no search finds, describes the store.
"""

from __future__ import annotations

import base64
import contextlib
import json
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError
from mmattn.retrieval.entries import Id
from mmattn.retrieval.scoring import directions
from mmattn.retrieval.stores.database import DatabaseStore, Row, facts_of

_NAMES = uuid.uuid5(uuid.NAMESPACE_DNS, "mmattn")
#: The point that describes the store; no id of an entry is written like it in JSON.
ABOUT = str(uuid.uuid5(_NAMES, "about"))


class PointStore(DatabaseStore):
    """Entries as points of Qdrant. A subclass sends the requests."""

    #: The lock that all requests take; a server needs none.
    _lock: contextlib.AbstractContextManager[Any]

    @abstractmethod
    def _point(self, key: str, vectors: Mapping[str, list[float]], payload: Mapping[str, Any]) -> Any:
        """Return a point of the library."""

    @abstractmethod
    def _upsert(self, points: list[Any]) -> None: ...

    @abstractmethod
    def _remove(self, keys: list[str]) -> None: ...

    @abstractmethod
    def _retrieve(self, keys: list[str]) -> list[Any]: ...

    @abstractmethod
    def _page(self, payload: Any, vectors: Any, offset: Any) -> tuple[list[Any], Any]:
        """Return points from an offset on, and the next offset."""

    @abstractmethod
    def _query(self, vectors: list[list[float]], name: str, count: int, facts: list[str]) -> list[list[Any]]:
        """Return the nearest points of each vector, by the vectors of this name."""

    @property
    def ids(self) -> tuple[Id, ...]:
        """Return all ids, in the order of adding."""
        payloads = [point.payload for point in self._scroll(["id", "place"], False)]
        return tuple(payload["id"] for payload in sorted(payloads, key=lambda payload: payload["place"]))

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        with self._lock:
            self._remove([key_of(name) for name in ids])

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock of this process; a server has no transactions of many requests."""
        return self._lock

    def _read_state(self) -> dict[str, Any]:
        with self._lock:
            points = self._retrieve([ABOUT])
        return dict(points[0].payload or {}) if points else {}

    def _write_state(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._upsert([self._point(ABOUT, {}, state)])

    def _fetch(self, ids: Sequence[Id] | None) -> list[Row]:
        if ids is None:
            return [_as_row(point) for point in self._scroll(True, ["vector"])]
        with self._lock:
            return [_as_row(point) for point in self._retrieve([key_of(name) for name in ids])]

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
            points.append(self._point(key_of(row.id), vectors, payload))
        with self._lock:
            self._upsert(points)

    _replace = _insert

    def _scroll(self, payload: Any, vectors: Any) -> list[Any]:
        points: list[Any] = []
        offset = None
        with self._lock:
            while True:
                page, offset = self._page(payload, vectors, offset)
                points += [point for point in page if str(point.id) != ABOUT]
                if offset is None:
                    return points

    def _nearest(self, queries: Tensor, count: int, facts: list[str]) -> list[list[Row]]:
        cosine = self.metric == "cosine"
        vectors = (directions(queries.double()) if cosine else queries).tolist()
        with self._lock:
            answers = self._query(vectors, "direction" if cosine else "vector", count, facts)
        return [[_as_row(point) for point in points] for points in answers]


def key_of(name: Id) -> str:
    """Return the UUID of the point of an entry; 1 and "1" have two.

    >>> key_of(1)
    '599ae8f1-0430-5cdc-a98f-bc74e23890c7'
    """
    return str(uuid.uuid5(_NAMES, json.dumps(name)))


def condition(facts: list[str], models: Any) -> Any:
    """Return the filter, of the library's classes, for points that have all facts."""
    if not facts:
        return None
    return models.Filter(must=[models.FieldCondition(key="facts", match=models.MatchValue(value=f)) for f in facts])


def _as_row(point: Any) -> Row:
    payload, vector = point.payload, torch.tensor(point.vector["vector"], dtype=torch.float32)
    tokens = payload.get("tokens")
    packed = None if tokens is None else base64.b64decode(tokens)
    return Row(payload["place"], payload["id"], payload.get("text"), payload.get("metadata"), vector, packed)


def _check_ints(value: Any) -> None:
    """Refuse ints of more than 64 bits, which Qdrant would round."""
    if isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            _check_ints(one)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(f"ints in Qdrant have 64 bits, got {value!r:.80}; write it as text. Nothing was changed")
