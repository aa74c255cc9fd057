"""QdrantIndex: an index over a Qdrant collection, in this process or on a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mmattn.errors import ConfigError, IndexMismatchError
from mmattn.retrieval.embedding_space import Encoder
from mmattn.retrieval.index import Index
from mmattn.retrieval.stores import QdrantStore, VectorStore

if TYPE_CHECKING:
    from qdrant_client import QdrantClient


class QdrantIndex(Index):
    """An index whose entries are in a Qdrant collection. What `Index` says of ids, scores, filters and errors holds.

    `QdrantIndex.build` makes a collection (`location`, `client` and `collection` are those of `QdrantStore`), and
    `QdrantIndex.open` finds it again. A server of your own:

        docker run -p 6333:6333 -v "$PWD/qdrant:/qdrant/storage" qdrant/qdrant
        index = QdrantIndex.build(texts, encoder=encoder, location="http://localhost:6333")

    Unlike other indexes it filters by dicts only, and has no versions: a search sees changes as they arrive, and one
    process at a time may change a collection. `save` writes a copy of all entries, which `Index.load` opens in memory.

    >>> index = QdrantIndex.build([[1.0, 0.0], [0.0, 1.0]], ids=["x", 1], metadata=[{"odd": True}, None])
    >>> index.search([0.1, 0.9], 2).ids
    [[1, 'x']]
    >>> index.search([0.1, 0.9], 2, filter={"odd": True}).ids
    [['x', None]]
    """

    default_store = "qdrant"
    store: QdrantStore

    def __init__(self, store: VectorStore, encoder: Encoder | None = None) -> None:
        if not isinstance(store, QdrantStore):
            raise ConfigError(f"QdrantIndex is over a QdrantStore, got the store {store.kind!r}: use Index")
        super().__init__(store, encoder)

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
            location: as for `build`.
            client: as for `build`.
            collection: its name.
            encoder: what encodes texts; it must be the one the collection was built with.
            metric: the one the collection must have; None takes any.

        Raises:
            IndexFileError: there is no such collection, or `build` did not make it, or a newer version did.
            IndexMismatchError: another encoder, width or metric.
        """
        store = QdrantStore.connect(location, client=client, collection=collection)
        try:
            if metric not in (None, store.metric):
                raise IndexMismatchError(f"collection {collection!r} has metric {store.metric!r}, not {metric!r}")
            return cls(store, encoder)
        except BaseException:
            store.close()
            raise

    @property
    def client(self) -> QdrantClient:
        """The client of Qdrant."""
        return self.store.client

    @property
    def collection(self) -> str:
        """The name of the collection."""
        return self.store.collection

    def __repr__(self) -> str:
        return f"QdrantIndex({len(self)} entries, e={self.dim}, {self.metric}, collection {self.collection!r})"

    def _like(self, store: VectorStore) -> Index:
        return Index(store)
