"""Prefix tuning (arXiv 2101.00190)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.prefix.adapter import PrefixAdapter, PrefixLayers

__all__ = ["PrefixAdapter", "PrefixLayers"]

register_adapter(PrefixAdapter, PrefixLayers)
