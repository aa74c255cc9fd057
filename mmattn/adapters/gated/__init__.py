"""Gated cross-attention (Flamingo, arXiv 2204.14198)."""

from mmattn.adapters.gated.block import GatedLayers
from mmattn.adapters.gated.config import GatedAdapter, GatedLayout
from mmattn.adapters.registry import register_adapter

__all__ = ["GatedAdapter", "GatedLayers", "GatedLayout"]

register_adapter(GatedAdapter, GatedLayers)
