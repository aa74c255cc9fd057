"""Vector stores: what holds and searches the entries of an index, one file each. Importing this registers ours."""

from __future__ import annotations

from mmattn.retrieval.stores.base import Candidates, DatabaseStore, VectorStore
from mmattn.retrieval.stores.exact import InMemoryStore
from mmattn.retrieval.stores.faiss import FlatStore, HNSWStore, IVFPQStore, IVFStore
from mmattn.retrieval.stores.lancedb import LanceStore
from mmattn.retrieval.stores.pgvector import PgvectorStore
from mmattn.retrieval.stores.qdrant import QdrantStore
from mmattn.retrieval.stores.qdrant_edge import QdrantEdgeStore
from mmattn.retrieval.stores.registry import register_store

__all__ = [
    "Candidates",
    "DatabaseStore",
    "FlatStore",
    "HNSWStore",
    "IVFPQStore",
    "IVFStore",
    "InMemoryStore",
    "LanceStore",
    "PgvectorStore",
    "QdrantEdgeStore",
    "QdrantStore",
    "VectorStore",
    "register_store",
]
