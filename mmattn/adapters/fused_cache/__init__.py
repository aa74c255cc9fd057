"""The KV cache of another language model, fused into the host's (arXiv 2510.03215)."""

from mmattn.adapters.fused_cache.config import FusedCacheAdapter

__all__ = ["FusedCacheAdapter"]
