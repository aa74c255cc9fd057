"""Chunked cross-attention to retrieved neighbours (RETRO, arXiv 2112.04426)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.chunked.adapter import ChunkedAdapter, ChunkedLayers, MemoryNeighbours

__all__ = ["ChunkedAdapter", "MemoryNeighbours"]

register_adapter(ChunkedAdapter, ChunkedLayers)
