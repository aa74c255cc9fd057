"""The kinds of adapters: their settings, how they read a memory, and their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.adapters.chunked.adapter import ChunkedAdapter
    from mmattn.adapters.composed.adapter import ComposedAdapter
    from mmattn.adapters.decoupled.adapter import DecoupledAdapter
    from mmattn.adapters.decoupled.joint import JointDecoupledAdapter
    from mmattn.adapters.fused_cache.adapter import FusedCacheAdapter
    from mmattn.adapters.gated.adapter import GatedAdapter
    from mmattn.adapters.inserted.adapter import InsertedAdapter
    from mmattn.adapters.joined.adapter import JoinedAdapter
    from mmattn.adapters.passages.adapter import PassageAdapter
    from mmattn.adapters.prefix.adapter import PrefixAdapter

__all__ = [
    "ChunkedAdapter",
    "ComposedAdapter",
    "DecoupledAdapter",
    "FusedCacheAdapter",
    "GatedAdapter",
    "JoinedAdapter",
    "InsertedAdapter",
    "JointDecoupledAdapter",
    "PassageAdapter",
    "PrefixAdapter",
]

__getattr__, __dir__ = lazy_exports(__name__)
