"""Chunked cross-attention to retrieved neighbours (RETRO, arXiv 2112.04426)."""

from mmattn.adapters.chunked.config import ChunkedAdapter
from mmattn.adapters.chunked.layers import ChunkedLayers, MemoryNeighbours
from mmattn.adapters.registry import register_adapter

__all__ = ["ChunkedAdapter", "MemoryNeighbours"]

register_adapter(ChunkedAdapter, ChunkedLayers)
