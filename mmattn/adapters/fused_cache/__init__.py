"""The KV cache of another language model, fused into the host's (arXiv 2510.03215)."""

from mmattn.adapters.fused_cache.config import FusedCacheAdapter
from mmattn.adapters.fused_cache.layers import FusedCacheLayers
from mmattn.adapters.registry import register_adapter

__all__ = ["FusedCacheAdapter"]

register_adapter(FusedCacheAdapter, FusedCacheLayers)
