"""Retrieval: indexes of entries, hits as memory, chunking, reranking, corpora and kNN-LM."""

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
    from mmattn.retrieval.knn_lm import knn_log_probs, next_token_states
    from mmattn.retrieval.multi_vector import MultiVectorIndex
    from mmattn.retrieval.rerank import Reranked, Reranker
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
    "MultiVectorIndex",
    "PgvectorStore",
    "QdrantStore",
    "Reranked",
    "Reranker",
    "VectorStore",
    "best_rows",
    "chunk",
    "embed_corpus",
    "knn_log_probs",
    "next_token_states",
    "register_store",
    "score",
]

__getattr__, __dir__ = lazy_exports(__name__)
