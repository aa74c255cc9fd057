"""A memory as tokens before the text."""

from mmattn.adapters.inserted.config import InsertedAdapter
from mmattn.adapters.inserted.layers import EmbeddingReader, InsertedLayers
from mmattn.adapters.registry import register_adapter

__all__ = ["EmbeddingReader", "InsertedAdapter"]

register_adapter(InsertedAdapter, InsertedLayers)
