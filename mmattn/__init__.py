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
    "CrossAttention": "mmattn.core.layers",
    "SelfAttention": "mmattn.core.layers",
    "Memory": "mmattn.memory",
    "SharedMemory": "mmattn.memory_parts",
    "MemoryStream": "mmattn.memory_stream",
    # The adapted host
    "attach": "mmattn.hosts.attach",
    "load": "mmattn.hosts.load",
    "load_published": "mmattn.hosts.load",
    "GatedAdapter": "mmattn.adapters.gated",
    "ChunkedAdapter": "mmattn.adapters.chunked",
    "ComposedAdapter": "mmattn.adapters.composed",
    "DecoupledAdapter": "mmattn.adapters.decoupled",
    "Resampler": "mmattn.adapters.resampler",
    "AugmentingModel": "mmattn.adapters.augmenting",
    "Guidance": "mmattn.hosts.denoising.guidance",
    "doctor": "mmattn.inspect.diagnosis",
    "pipeline": "mmattn.pipelines.load",
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
    from mmattn.adapters.augmenting import AugmentingModel
    from mmattn.adapters.chunked import ChunkedAdapter
    from mmattn.adapters.composed import ComposedAdapter
    from mmattn.adapters.decoupled import DecoupledAdapter
    from mmattn.adapters.gated import GatedAdapter
    from mmattn.adapters.registry import register_adapter
    from mmattn.adapters.resampler import Resampler
    from mmattn.core import masks, positions
    from mmattn.core.attention import attend
    from mmattn.core.layers import CrossAttention, SelfAttention
    from mmattn.encoders.images import load_image
    from mmattn.encoders.openclip import OpenCLIPEncoder, OpenCLIPTextEncoder
    from mmattn.encoders.text import TextEncoder
    from mmattn.encoders.torchvision import TorchvisionEncoder
    from mmattn.hosts.attach import attach
    from mmattn.hosts.denoising.guidance import Guidance
    from mmattn.hosts.load import load, load_published
    from mmattn.hosts.registry import register_host
    from mmattn.inspect.diagnosis import doctor
    from mmattn.memory import Memory
    from mmattn.memory_parts import SharedMemory
    from mmattn.memory_stream import MemoryStream
    from mmattn.pipelines.load import pipeline
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
