"""A memory in the softmax of the host's own attention (KBLaM, arXiv 2410.10450)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.joined.adapter import JoinedAdapter, JoinedLayers

__all__ = ["JoinedAdapter"]

register_adapter(JoinedAdapter, JoinedLayers)
