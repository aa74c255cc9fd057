"""Retrieval: indexes of entries, hits as memory, chunking, corpora."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.retrieval.attention_search import IndexMemory
    from mmattn.retrieval.corpus import Chunk, chunk, embed_corpus
    from mmattn.retrieval.entries import Entries, Entry, Filter, Id
    from mmattn.retrieval.hits import Hits
    from mmattn.retrieval.index import Index
    from mmattn.retrieval.scoring import best_rows, score
    from mmattn.retrieval.stores import Candidates, VectorStore, register_store
    from mmattn.retrieval.stores.database import DatabaseStore
    from mmattn.retrieval.stores.exact import InMemoryStore
    from mmattn.retrieval.stores.faiss import HNSWStore, IVFPQStore, IVFStore
    from mmattn.retrieval.stores.lancedb import LanceStore
    from mmattn.retrieval.stores.pgvector import PgvectorStore
    from mmattn.retrieval.stores.qdrant import QdrantStore

__all__ = [
    "Candidates",
    "Chunk",
    "DatabaseStore",
    "Entries",
    "Entry",
    "Filter",
    "HNSWStore",
    "Hits",
    "IVFPQStore",
    "IVFStore",
    "Id",
    "InMemoryStore",
    "Index",
    "IndexMemory",
    "LanceStore",
    "PgvectorStore",
    "QdrantStore",
    "VectorStore",
    "best_rows",
    "chunk",
    "embed_corpus",
    "register_store",
    "score",
]

__getattr__, __dir__ = lazy_exports(__name__)
