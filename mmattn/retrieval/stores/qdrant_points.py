"""How entries lie in a Qdrant collection, so that every answer can be that of `Index`.

point       its id is the UUID5 of the entry's id, text or int, which stands in the payload itself
"vector"    the vector as it was given, from which scores are computed
"direction" under the cosine: the vector at length 1, which is what Qdrant searches. Qdrant keeps vectors of the
            cosine at that length only, and takes very short ones as they are; so "vector" lies beside it, on the
            disk and without a graph
payload     id, text, metadata, place in the order of adding, and facts: one digest per metadata key and value.
            Filters compare digests, since Qdrant's own comparison knows no floats and no nesting, and takes a list
            for each of its values
one point more, without a vector, which no search finds: width, metric, encoder, and what to number from
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.entries import Entries, Filter
from mmattn.retrieval.entry_checks import MAX_METADATA
from mmattn.retrieval.scoring import METRICS, directions
from mmattn.storage.json_files import dump_json

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

FORMAT = "mmattn-qdrant"
FORMAT_VERSION = 1

#: The point that says what the collection is. No id of an entry is written like this: they are written as JSON.
_NAMES = uuid.uuid5(uuid.NAMESPACE_DNS, "mmattn")
ABOUT = str(uuid.uuid5(_NAMES, "about"))

_DISTANCES = {"cosine": "COSINE", "ip": "DOT", "l2": "EUCLID"}


def qdrant() -> Any:
    """The library, or a message which extra brings it."""
    return import_extra("qdrant_client", "scale")


def connect(location: str | os.PathLike[str]) -> QdrantClient:
    """A client of a server, of a folder, or of nothing but memory."""
    place = os.fspath(location)
    if place == ":memory:":
        return qdrant().QdrantClient(place)
    return qdrant().QdrantClient(**({"url": place} if "://" in place else {"path": place}))


def is_local(client: QdrantClient) -> bool:
    """Whether Qdrant runs in this process, in memory or over a folder."""
    options = client.init_options
    return options["path"] is not None or options["location"] == ":memory:"


def create(client: QdrantClient, collection: str, dim: int, metric: str) -> None:
    """Make a collection for vectors of a width and metric; on a server, with an index of the facts."""
    models = qdrant().models
    searched = models.VectorParams(size=dim, distance=models.Distance[_DISTANCES[metric]])
    vectors = {"vector": searched}
    if metric == "cosine":
        given = models.VectorParams(
            size=dim, distance=models.Distance.DOT, on_disk=True, hnsw_config=models.HnswConfigDiff(m=0)
        )
        vectors = {"vector": given, "direction": searched}
    client.create_collection(collection, vectors_config=vectors)
    if not is_local(client):
        client.create_payload_index(collection, "facts", models.PayloadSchemaType.KEYWORD, wait=True)


def about_point(about: dict[str, Any]) -> Any:
    """The point that `read_about` reads."""
    payload = {"format": FORMAT, "format_version": FORMAT_VERSION, **about}
    return qdrant().models.PointStruct(id=ABOUT, vector={}, payload=payload)


def read_about(client: QdrantClient, collection: str) -> dict[str, Any]:
    """What a collection is: "dim", "metric", "encoder", "next_id" and "next_place".

    Raises:
        IndexFileError: it was not made here, or by another version, or changed since.
    """
    points = client.retrieve(collection, [ABOUT])
    about: dict[str, Any] = dict(points[0].payload or {}) if points else {}
    found = (about.pop("format", None), about.pop("format_version", None))
    if found != (FORMAT, FORMAT_VERSION):
        raise IndexFileError(
            f"QdrantIndex of this version has not made collection {collection!r}: it says format {found[0]!r}, version "
            f"{found[1]!r}. Build one under another name"
        )
    counts = ("dim", "next_id", "next_place")
    sound = set(about) == {*counts, "metric", "encoder"} and about["metric"] in METRICS
    if (
        not sound
        or not all(type(about[name]) is int and about[name] >= 0 for name in counts)
        or not isinstance(about["encoder"], (str, type(None)))
    ):
        raise IndexFileError(f"collection {collection!r} was changed since it was made: it is described by {about!r}")
    return about


def point_id(name: object) -> str:
    """The UUID of an entry; 1 and "1" have two."""
    return str(uuid.uuid5(_NAMES, json.dumps(name, default=repr)))


def as_points(entries: Entries, places: Sequence[int], metric: str) -> list[Any]:
    """Entries as points.

    Args:
        entries: n entries.
        places: n numbers, which grow in the order of adding.
        metric: how the vectors are compared.

    Raises:
        ConfigError: an int of more than 64 bits.
    """
    point = qdrant().models.PointStruct
    vectors = {"vector": entries.vectors.tolist()}
    if metric == "cosine":
        vectors["direction"] = directions(entries.vectors.double()).float().tolist()
    points = []
    for row, (name, place) in enumerate(zip(entries.ids, places, strict=True)):
        text, metadata = entries.texts[row], entries.metadata[row]
        payload = {"id": _equal(name), "text": text, "metadata": metadata, "facts": _facts(metadata), "place": place}
        points.append(point(id=point_id(name), vector={key: vectors[key][row] for key in vectors}, payload=payload))
    return points


def as_entries(points: Sequence[Any], dim: int) -> tuple[Entries, list[int]]:
    """Points as entries, each once, in the order of their places, and these."""
    points = sorted({point.id: point for point in points}.values(), key=lambda point: point.payload["place"])
    ids, texts, metadata = (tuple(point.payload.get(key) for point in points) for key in ("id", "text", "metadata"))
    vectors = torch.tensor([point.vector["vector"] for point in points], dtype=torch.float32).view(len(points), dim)
    return Entries(ids, texts, metadata, vectors), [point.payload["place"] for point in points]


def condition(wanted: Filter | None) -> Any:
    """The Qdrant filter that finds entries whose metadata is equal in some keys.

    Raises:
        ConfigError: it is no dict, or not of JSON values.
    """
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping):
        raise ConfigError(
            f"filter must be a dict of metadata that must be equal, got {type(wanted).__name__}: Qdrant compares where "
            "the entries are, and cannot call a function. Put what it would say into the metadata, or use Index"
        )
    models = qdrant().models
    facts = [models.MatchValue(value=_fact(key, value)) for key, value in wanted.items()]
    return models.Filter(must=[models.FieldCondition(key="facts", match=fact) for fact in facts])


def _facts(metadata: Any) -> list[str]:
    if isinstance(metadata, dict):
        return [_fact(key, value) for key, value in metadata.items()]
    _equal(metadata)
    return []


def _fact(key: str, value: Any) -> str:
    return hashlib.sha256(dump_json("filter", [key, _equal(value)], MAX_METADATA)).hexdigest()[:32]


def _equal(value: Any) -> Any:
    """The same JSON for all values that Python says are equal: True, 1 and 1.0, or dicts in any order.

    Raises:
        ConfigError: an int of more than 64 bits, which Qdrant would round.
    """
    if isinstance(value, dict):
        return {key: _equal(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_equal(one) for one in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(f"ints in Qdrant have 64 bits, got {value!r:.80}; write it as text. Nothing was changed")
    return int(value) if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()) else value
