"""Passages that the host has read one by one (arXiv 2409.15355)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.passages.adapter import LayerGroup, PassageAdapter, PassageLayers, Passages

__all__ = ["LayerGroup", "PassageAdapter", "PassageLayers", "Passages"]

register_adapter(PassageAdapter, PassageLayers)
