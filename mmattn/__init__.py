"""mmattn: let any frozen model look at something it was never built to see.

Small trainable cross-attention adapters read an external memory (image patches, retrieved passages, another model's
hidden states) for a frozen host. Names are loaded when first used, so that importing mmattn costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmattn.lazy import lazy_exports

__version__ = "1.0.0"

if TYPE_CHECKING:
    from mmattn import errors
    from mmattn.adapters.base import register_adapter
    from mmattn.adapters.chunked import ChunkedAdapter
    from mmattn.adapters.composed import AugmentingModel, ComposedAdapter
    from mmattn.adapters.decoupled import DecoupledAdapter
    from mmattn.adapters.gated import GatedAdapter
    from mmattn.adapters.resampler import Resampler
    from mmattn.core import masks, positions
    from mmattn.core.attention import attend
    from mmattn.core.cross_attention import CrossAttention, SelfAttention
    from mmattn.encoders.base import register_encoder
    from mmattn.encoders.images import load_image
    from mmattn.encoders.openclip import OpenCLIPEncoder
    from mmattn.encoders.text import TextEncoder
    from mmattn.encoders.torchvision import TorchvisionEncoder
    from mmattn.hosts.attach import attach, register_host
    from mmattn.hosts.diffusion.guidance import Guidance
    from mmattn.hosts.loading import load, load_published
    from mmattn.inspect.doctor.run import doctor
    from mmattn.memory import Memory, MemoryStream, SharedMemory
    from mmattn.pipelines.base import pipeline
    from mmattn.retrieval.index import Index
    from mmattn.retrieval.stores import register_store

__all__ = [
    # The layer
    "attend",
    "CrossAttention",
    "SelfAttention",
    "Memory",
    "SharedMemory",
    "MemoryStream",
    # The adapted host
    "attach",
    "load",
    "load_published",
    "GatedAdapter",
    "ChunkedAdapter",
    "ComposedAdapter",
    "DecoupledAdapter",
    "Resampler",
    "AugmentingModel",
    "Guidance",
    "doctor",
    "pipeline",
    # What memories come from
    "OpenCLIPEncoder",
    "TorchvisionEncoder",
    "TextEncoder",
    "load_image",
    "Index",
    # Kinds of your own
    "register_adapter",
    "register_encoder",
    "register_host",
    "register_store",
    # Modules
    "errors",
    "masks",
    "positions",
]

# Rooms are loaded by name, too: mmattn.inspect.record, mmattn.retrieval.Index, …
_ROOMS = (
    "adapters",
    "core",
    "encoders",
    "extend",
    "hosts",
    "inspect",
    "models",
    "pipelines",
    "retrieval",
    "storage",
    "testing",
    "training",
)

_exported, _exported_names = lazy_exports(__name__)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"mmattn.{name}")
    try:
        return _exported(name)
    except AttributeError as error:
        # Tools ask for names with an underscore; no room is imported for them.
        rooms = [] if name.startswith("_") else [importlib.import_module(f"mmattn.{room}") for room in _ROOMS]
        homes = [room.__name__ for room in rooms if name in getattr(room, "__all__", ())]
        if homes:
            message = f"module 'mmattn' has no attribute {name!r}; it is {homes[0]}.{name}"
            raise AttributeError(message, name=name, obj=error.obj) from None
        raise


def __dir__() -> list[str]:
    return sorted({*_exported_names(), *_ROOMS})
