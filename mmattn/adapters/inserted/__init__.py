"""A memory as tokens before the text."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.inserted.adapter import InsertedAdapter, InsertedLayers

__all__ = ["InsertedAdapter"]

register_adapter(InsertedAdapter, InsertedLayers)
