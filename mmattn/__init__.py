"""mmattn: let any frozen model look at something it was never built to see.

Small trainable cross-attention adapters read an external memory (image patches, retrieved passages, another model's
hidden states) for a frozen host. Names are loaded when first used, so that importing mmattn costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    # The layer
    "attend": "mmattn.core.attention",
    "CrossAttention": "mmattn.core.cross_attention",
    "SelfAttention": "mmattn.core.cross_attention",
    "Memory": "mmattn.memory.memory",
    "SharedMemory": "mmattn.memory.shared",
    "MemoryStream": "mmattn.memory.stream",
    # The adapted host
    "attach": "mmattn.hosts.attach",
    "load": "mmattn.hosts.loading",
    "load_published": "mmattn.hosts.loading",
    "GatedAdapter": "mmattn.adapters.gated.adapter",
    "ChunkedAdapter": "mmattn.adapters.chunked.adapter",
    "ComposedAdapter": "mmattn.adapters.composed.adapter",
    "DecoupledAdapter": "mmattn.adapters.decoupled.adapter",
    "Resampler": "mmattn.adapters.resampler",
    "AugmentingModel": "mmattn.adapters.composed.augmenting_model",
    "Guidance": "mmattn.hosts.diffusion.guidance",
    "doctor": "mmattn.inspect.diagnosis",
    "pipeline": "mmattn.pipelines.loading",
    # What memories come from
    "OpenCLIPEncoder": "mmattn.encoders.openclip",
    "OpenCLIPTextEncoder": "mmattn.encoders.openclip",
    "TorchvisionEncoder": "mmattn.encoders.torchvision",
    "TextEncoder": "mmattn.encoders.text",
    "load_image": "mmattn.encoders.images",
    "Index": "mmattn.retrieval.index",
    # Kinds of your own
    "register_adapter": "mmattn.adapters.registry",
    "register_host": "mmattn.hosts.registry",
    "register_store": "mmattn.retrieval.stores.registry",
}
_MODULES = {"errors": "mmattn.errors", "masks": "mmattn.core.masks", "positions": "mmattn.core.positions"}
# Rooms that `import mmattn` gives by their names, too: mmattn.inspect.record, mmattn.seq2seq.EncoderDecoder, …
_ROOMS = (
    "adapters",
    "core",
    "encoders",
    "hosts",
    "inspect",
    "pipelines",
    "retrieval",
    "seq2seq",
    "storage",
    "testing",
    "training",
)

__all__ = [*_HOME, *_MODULES]

if TYPE_CHECKING:
    from mmattn import errors
    from mmattn.adapters.chunked.adapter import ChunkedAdapter
    from mmattn.adapters.composed.adapter import ComposedAdapter
    from mmattn.adapters.composed.augmenting_model import AugmentingModel
    from mmattn.adapters.decoupled.adapter import DecoupledAdapter
    from mmattn.adapters.gated.adapter import GatedAdapter
    from mmattn.adapters.registry import register_adapter
    from mmattn.adapters.resampler import Resampler
    from mmattn.core import masks, positions
    from mmattn.core.attention import attend
    from mmattn.core.cross_attention import CrossAttention, SelfAttention
    from mmattn.encoders.images import load_image
    from mmattn.encoders.openclip import OpenCLIPEncoder, OpenCLIPTextEncoder
    from mmattn.encoders.text import TextEncoder
    from mmattn.encoders.torchvision import TorchvisionEncoder
    from mmattn.hosts.attach import attach
    from mmattn.hosts.diffusion.guidance import Guidance
    from mmattn.hosts.loading import load, load_published
    from mmattn.hosts.registry import register_host
    from mmattn.inspect.diagnosis import doctor
    from mmattn.memory import Memory, MemoryStream, SharedMemory
    from mmattn.pipelines.loading import pipeline
    from mmattn.retrieval.index import Index
    from mmattn.retrieval.stores.registry import register_store


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"mmattn.{name}")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOME:
        # Names of tools that look for attributes begin with an underscore, and no room is imported for them.
        rooms = [] if name.startswith("_") else [importlib.import_module(f"mmattn.{room}") for room in _ROOMS]
        rooms = [room for room in rooms if name in getattr(room, "__all__", ())]
        where = f"; it is {rooms[0].__name__}.{name}" if rooms else ""
        raise AttributeError(f"module 'mmattn' has no attribute {name!r}{where}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
