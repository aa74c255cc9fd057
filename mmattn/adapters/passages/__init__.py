"""Passages that the host has read one by one (arXiv 2409.15355)."""

from mmattn.adapters.passages.config import LayerGroup, PassageAdapter, PassageLayers, Passages

__all__ = ["LayerGroup", "PassageAdapter", "PassageLayers", "Passages"]
