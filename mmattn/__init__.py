"""mmattn: let any frozen model look at something it was never built to see.

Small trainable cross-attention adapters read an external memory (image patches, retrieved passages, another model's
hidden states) for a frozen host. Names are loaded when first used, so that importing mmattn costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "attend": "mmattn.core.attention",
    "CrossAttention": "mmattn.core.layers",
    "SelfAttention": "mmattn.core.layers",
    "TransformerBlock": "mmattn.core.transformer",
    "EncoderDecoder": "mmattn.seq2seq",
    "KeyValue": "mmattn.core.kv",
    "GrowingCache": "mmattn.core.text_cache",
    "PagePool": "mmattn.core.paged_cache",
    "PagedCache": "mmattn.core.paged_cache",
    "Memory": "mmattn.memory",
    "GatedAdapter": "mmattn.adapters.gated",
    "ChunkedAdapter": "mmattn.adapters.chunked",
    "ComposedAdapter": "mmattn.adapters.composed",
    "DecoupledAdapter": "mmattn.adapters.decoupled",
    "Resampler": "mmattn.adapters.resampler",
    "AugmentingModel": "mmattn.adapters.augmenting",
    "Guidance": "mmattn.hosts.unet.guidance",
    "attach": "mmattn.hosts",
    "load": "mmattn.hosts",
    "load_published": "mmattn.hosts",
    "OpenCLIPEncoder": "mmattn.encoders.openclip",
    "OpenCLIPTextEncoder": "mmattn.encoders.openclip",
    "TorchvisionEncoder": "mmattn.encoders.torchvision",
    "TextEncoder": "mmattn.encoders.text",
    "load_image": "mmattn.encoders.images",
    "Index": "mmattn.retrieval.index",
    "QdrantIndex": "mmattn.retrieval.qdrant",
    "Hits": "mmattn.retrieval.hits",
    "knn_log_probs": "mmattn.retrieval.knn_lm",
    "next_token_states": "mmattn.retrieval.knn_lm",
    "record": "mmattn.inspect.recording",
    "attribute": "mmattn.inspect.attribution",
    "Trace": "mmattn.inspect.trace",
    "doctor": "mmattn.inspect.doctor",
    "MmattnError": "mmattn.errors",
    "MaskError": "mmattn.errors",
    "ShapeError": "mmattn.errors",
    "ConfigError": "mmattn.errors",
    "NonFiniteError": "mmattn.errors",
    "AttachError": "mmattn.errors",
    "ConditionError": "mmattn.errors",
    "AdapterFileError": "mmattn.errors",
    "IndexMismatchError": "mmattn.errors",
    "IndexFileError": "mmattn.errors",
    "ImageError": "mmattn.errors",
    "TextError": "mmattn.errors",
}
_PARTS = {"errors": "mmattn.errors", "masks": "mmattn.core.masks", "positions": "mmattn.core.positions"}

__all__ = [*_HOME, *_PARTS]

if TYPE_CHECKING:
    from mmattn import errors
    from mmattn.adapters.augmenting import AugmentingModel
    from mmattn.adapters.chunked import ChunkedAdapter
    from mmattn.adapters.composed import ComposedAdapter
    from mmattn.adapters.decoupled import DecoupledAdapter
    from mmattn.adapters.gated import GatedAdapter
    from mmattn.adapters.resampler import Resampler
    from mmattn.core import masks, positions
    from mmattn.core.attention import attend
    from mmattn.core.kv import KeyValue
    from mmattn.core.layers import CrossAttention, SelfAttention
    from mmattn.core.paged_cache import PagedCache, PagePool
    from mmattn.core.text_cache import GrowingCache
    from mmattn.core.transformer import TransformerBlock
    from mmattn.encoders.images import load_image
    from mmattn.encoders.openclip import OpenCLIPEncoder, OpenCLIPTextEncoder
    from mmattn.encoders.text import TextEncoder
    from mmattn.encoders.torchvision import TorchvisionEncoder
    from mmattn.errors import (
        AdapterFileError,
        AttachError,
        ConditionError,
        ConfigError,
        ImageError,
        IndexFileError,
        IndexMismatchError,
        MaskError,
        MmattnError,
        NonFiniteError,
        ShapeError,
        TextError,
    )
    from mmattn.hosts import attach, load, load_published
    from mmattn.hosts.unet.guidance import Guidance
    from mmattn.inspect.attribution import attribute
    from mmattn.inspect.recording import record
    from mmattn.inspect.trace import Trace
    from mmattn.memory import Memory
    from mmattn.retrieval.hits import Hits
    from mmattn.retrieval.index import Index
    from mmattn.retrieval.knn_lm import knn_log_probs, next_token_states
    from mmattn.retrieval.qdrant import QdrantIndex
    from mmattn.seq2seq.encoder_decoder import EncoderDecoder


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(_PARTS[name])
    if name not in _HOME:
        raise AttributeError(f"module 'mmattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
