"""Passages that the host has read one by one (arXiv 2409.15355)."""

from mmattn.adapters.passages.config import PassageAdapter
from mmattn.adapters.passages.layers import LayerGroup, PassageLayers, Passages
from mmattn.adapters.registry import register_adapter

__all__ = ["LayerGroup", "PassageAdapter", "PassageLayers", "Passages"]

register_adapter(PassageAdapter, PassageLayers)
