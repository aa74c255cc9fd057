"""The KV cache of another language model, fused into the host's (arXiv 2510.03215)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.fused_cache.adapter import FusedCacheAdapter, FusedCacheLayers

__all__ = ["FusedCacheAdapter"]

register_adapter(FusedCacheAdapter, FusedCacheLayers)
