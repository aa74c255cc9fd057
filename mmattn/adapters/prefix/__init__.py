"""Prefix tuning (arXiv 2101.00190)."""

from mmattn.adapters.prefix.config import PrefixAdapter, PrefixLayers

__all__ = ["PrefixAdapter", "PrefixLayers"]
