"""Prefix tuning (arXiv 2101.00190)."""

from mmattn.adapters.prefix.config import PrefixAdapter
from mmattn.adapters.prefix.layers import PrefixLayers
from mmattn.adapters.registry import register_adapter

__all__ = ["PrefixAdapter", "PrefixLayers"]

register_adapter(PrefixAdapter, PrefixLayers)
