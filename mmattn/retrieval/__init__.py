"""Retrieval: indexes of entries, hits as memory, chunking, corpora."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.retrieval.attention_search import IndexMemory
    from mmattn.retrieval.chunking import Chunk, chunk
    from mmattn.retrieval.corpus import embed_corpus
    from mmattn.retrieval.entries import Entries, Entry, Filter, Id
    from mmattn.retrieval.hits import Hits
    from mmattn.retrieval.index import Index
    from mmattn.retrieval.scoring import best_rows, score
    from mmattn.retrieval.stores import (
        Candidates,
        DatabaseStore,
        HNSWStore,
        InMemoryStore,
        IVFPQStore,
        IVFStore,
        LanceStore,
        PgvectorStore,
        QdrantStore,
        VectorStore,
        register_store,
    )

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
