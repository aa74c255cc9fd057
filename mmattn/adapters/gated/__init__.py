"""Gated cross-attention (Flamingo, arXiv 2204.14198)."""

from mmattn.adapters.gated.config import GatedAdapter, GatedLayers, GatedLayout

__all__ = ["GatedAdapter", "GatedLayers", "GatedLayout"]
