"""Chunked cross-attention to retrieved neighbours (RETRO, arXiv 2112.04426)."""

from mmattn.adapters.chunked.config import ChunkedAdapter, MemoryNeighbours

__all__ = ["ChunkedAdapter", "MemoryNeighbours"]
