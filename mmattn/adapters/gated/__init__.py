"""Gated cross-attention (Flamingo, arXiv 2204.14198)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.gated.block import GatedLayers
from mmattn.adapters.gated.config import GatedAdapter, GatedLayout

__all__ = ["GatedAdapter", "GatedLayers", "GatedLayout"]

register_adapter(GatedAdapter, GatedLayers)
