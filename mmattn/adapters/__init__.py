"""The kinds of adapters: their settings, how they read a memory, and their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.adapters.chunked import ChunkedAdapter
    from mmattn.adapters.composed import ComposedAdapter
    from mmattn.adapters.decoupled import DecoupledAdapter, JointDecoupledAdapter
    from mmattn.adapters.fused_cache import FusedCacheAdapter
    from mmattn.adapters.gated import GatedAdapter
    from mmattn.adapters.inserted import InsertedAdapter
    from mmattn.adapters.joined import JoinedAdapter
    from mmattn.adapters.passages import PassageAdapter
    from mmattn.adapters.prefix import PrefixAdapter

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
