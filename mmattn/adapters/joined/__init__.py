"""A memory in the softmax of the host's own attention (KBLaM, arXiv 2410.10450)."""

from mmattn.adapters.joined.config import JoinedAdapter
from mmattn.adapters.joined.layers import JoinedLayers
from mmattn.adapters.registry import register_adapter

__all__ = ["JoinedAdapter"]

register_adapter(JoinedAdapter, JoinedLayers)
