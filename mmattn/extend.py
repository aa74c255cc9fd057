"""Building blocks for adapters, hosts, stores, encoders and memory types of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.adapters.base import AdapterLayers, register_adapter, register_memory_type
    from mmattn.adapters.projection import PreparedMemory, ProjectedView, VectorMemory
    from mmattn.adapters.protocols import BoundMemory, HeadSizes, Host, Scale, Site, Traits, View
    from mmattn.adapters.settings import AdapterConfig, chosen_sites, random_memory, settle_layers
    from mmattn.adapters.text_state import TextState
    from mmattn.core.cross_attention import CrossAttention
    from mmattn.core.key_values import KeyValue
    from mmattn.encoders.base import TextEncoderBase, register_encoder
    from mmattn.encoders.images import ImageEncoder, ImageProcessor
    from mmattn.hosts.attach import register_host
    from mmattn.hosts.model import AdaptedModel
    from mmattn.retrieval.entries import Entries
    from mmattn.retrieval.scoring import best_rows
    from mmattn.retrieval.stores import Candidates, VectorStore, register_store

__all__ = [
    # An adapter
    "register_adapter",
    "AdapterConfig",
    "AdapterLayers",
    "CrossAttention",
    "HeadSizes",
    "Host",
    "KeyValue",
    "Scale",
    "Site",
    "Traits",
    "chosen_sites",
    "random_memory",
    "settle_layers",
    # Its memory, in a call and in a forward
    "register_memory_type",
    "BoundMemory",
    "PreparedMemory",
    "ProjectedView",
    "TextState",
    "VectorMemory",
    "View",
    # A host
    "register_host",
    "AdaptedModel",
    # An encoder
    "register_encoder",
    "ImageEncoder",
    "ImageProcessor",
    "TextEncoderBase",
    # A store
    "register_store",
    "Candidates",
    "Entries",
    "VectorStore",
    "best_rows",
]

__getattr__, __dir__ = lazy_exports(__name__)
