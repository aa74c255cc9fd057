"""Vector stores, one file each; importing this registers ours."""

from __future__ import annotations

from mmattn.retrieval.stores.base import Candidates, VectorStore, register_store
from mmattn.retrieval.stores.database import DatabaseStore
from mmattn.retrieval.stores.exact import InMemoryStore
from mmattn.retrieval.stores.faiss import HNSWStore, IVFPQStore, IVFStore
from mmattn.retrieval.stores.lancedb import LanceStore
from mmattn.retrieval.stores.pgvector import PgvectorStore
from mmattn.retrieval.stores.qdrant import QdrantStore

__all__ = [
    "Candidates",
    "DatabaseStore",
    "HNSWStore",
    "IVFPQStore",
    "IVFStore",
    "InMemoryStore",
    "LanceStore",
    "PgvectorStore",
    "QdrantStore",
    "VectorStore",
    "register_store",
]
