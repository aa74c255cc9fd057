"""A memory in the softmax of the host's own attention (KBLaM, arXiv 2410.10450)."""

from mmattn.adapters.joined.config import JoinedAdapter

__all__ = ["JoinedAdapter"]
