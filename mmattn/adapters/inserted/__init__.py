"""A memory as tokens before the text."""

from mmattn.adapters.inserted.config import EmbeddingReader, InsertedAdapter

__all__ = ["EmbeddingReader", "InsertedAdapter"]
