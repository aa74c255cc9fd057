"""How entries lie in a Qdrant collection or shard, so that every answer can be that of `Index`.

point       its id is the UUID5 of the entry's id, text or int, which stands in the payload itself
"vector"    the vector as it was given, from which scores are computed
"direction" under the cosine: the vector at length 1, which is what Qdrant searches. Qdrant keeps vectors of the
            cosine at that length only, and takes very short ones as they are; so "vector" lies beside it, on the
            disk and without a graph
payload     id, text, metadata, place in the order of adding, facts: one digest per metadata key and value, and
            where there are any the encoded tokens, a safetensors file in base64. Filters compare digests, since
            Qdrant's own comparison knows no floats and no nesting, and takes a list for each of its values
one point more, without a vector, which no search finds: width, metric, encoder, and what to number from
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mmattn.errors import ConfigError, IndexFileError, import_extra
from mmattn.retrieval.entries import Entries, Filter
from mmattn.retrieval.scoring import METRICS, directions
from mmattn.retrieval.stores.packed_tokens import pack_tokens, unpack_tokens
from mmattn.retrieval.stores.store_state import NAMES, facts_of, key_of, wanted_facts

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

FORMAT = "mmattn-qdrant"
FORMAT_VERSION = 1

#: What a search reads of a point.
PAYLOAD = ["id", "text", "metadata", "place", "tokens"]

#: The point that says what the collection is.
ABOUT = str(uuid.uuid5(NAMES, "about"))

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


def about_point(about: dict[str, Any], point: Any) -> Any:
    """The point that `read_about` reads, of the library's class of points."""
    payload = {"format": FORMAT, "format_version": FORMAT_VERSION, **about}
    return point(id=ABOUT, vector={}, payload=payload)


def read_about(client: QdrantClient, collection: str) -> dict[str, Any]:
    """What a collection is: "dim", "metric", "encoder", "next_id" and "next_place".

    Raises:
        IndexFileError: it was not made here, or by another version, or changed since.
    """
    return check_about(client.retrieve(collection, [ABOUT]), collection)


def check_about(points: Sequence[Any], collection: str) -> dict[str, Any]:
    """What the point `ABOUT` says, or no point where there is none.

    Raises:
        IndexFileError: as for `read_about`.
    """
    about: dict[str, Any] = dict(points[0].payload or {}) if points else {}
    found = (about.pop("format", None), about.pop("format_version", None))
    if found != (FORMAT, FORMAT_VERSION):
        raise IndexFileError(
            f"this version of mmattn has not made collection {collection!r}: it says format {found[0]!r}, version "
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


def as_points(entries: Entries, places: Sequence[int], metric: str, point: Any) -> list[Any]:
    """Entries as points.

    Args:
        entries: n entries.
        places: n numbers, which grow in the order of adding.
        metric: how the vectors are compared.
        point: the library's class of points.

    Raises:
        ConfigError: an int of more than 64 bits.
    """
    packed = pack_tokens(entries.tokens, len(entries))
    vectors = {"vector": entries.vectors.tolist()}
    if metric == "cosine":
        vectors["direction"] = directions(entries.vectors.double()).float().tolist()
    points = []
    for row, (name, place) in enumerate(zip(entries.ids, places, strict=True)):
        text, metadata = entries.texts[row], entries.metadata[row]
        check_ints([name, metadata])
        payload = {"id": name, "text": text, "metadata": metadata, "facts": facts_of(metadata), "place": place}
        if (tokens := packed[row]) is not None:
            payload["tokens"] = base64.b64encode(tokens).decode()
        points.append(point(id=key_of(name), vector={key: vectors[key][row] for key in vectors}, payload=payload))
    return points


def as_entries(points: Sequence[Any], dim: int) -> tuple[Entries, list[int]]:
    """Points as entries, each once, in the order of their places, and these."""
    points = sorted({point.id: point for point in points}.values(), key=lambda point: point.payload["place"])
    ids, texts, metadata = (tuple(point.payload.get(key) for point in points) for key in ("id", "text", "metadata"))
    vectors = torch.tensor([point.vector["vector"] for point in points], dtype=torch.float32).view(len(points), dim)
    packed = [point.payload.get("tokens") for point in points]
    tokens = unpack_tokens([None if part is None else base64.b64decode(part) for part in packed])
    return Entries(ids, texts, metadata, vectors, tokens), [point.payload["place"] for point in points]


def condition(filter: Filter | None, models: Any) -> Any:
    """The Qdrant filter, of the library's classes, that finds entries whose metadata is equal in some keys.

    Raises:
        ConfigError: it is no dict, or not of JSON values.
    """
    check_ints(filter)
    facts = wanted_facts(filter)
    if facts is None:
        return None
    return models.Filter(must=[models.FieldCondition(key="facts", match=models.MatchValue(value=f)) for f in facts])


def check_ints(value: Any) -> None:
    """Refuse what Qdrant would round.

    Args:
        value: a JSON value.

    Raises:
        ConfigError: an int of more than 64 bits.
    """
    if isinstance(value, Mapping):
        for one in value.values():
            check_ints(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            check_ints(one)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(f"ints in Qdrant have 64 bits, got {value!r:.80}; write it as text. Nothing was changed")
