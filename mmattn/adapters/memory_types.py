"""Registry of the types that may be given as `memory=` besides vectors: memories in parts, streams, indexes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mmattn.adapters.protocols import BoundMemory

#: By type, how a memory of it is bound to an adapter: from the memory, the `AdapterLayers` and the frozen host.
BINDERS: dict[type, Callable[[Any, Any, nn.Module], BoundMemory]] = {}


def register_memory_type(kind: type, bind: Callable[[Any, Any, nn.Module], BoundMemory]) -> None:
    """Make a type known, so that any adapter that supports it takes its objects as `memory=`."""
    BINDERS[kind] = bind
