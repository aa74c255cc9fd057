"""Frozen models that gain a memory: `attach` joins, `load` and `load_published` join with weights from files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.hosts.attach import attach  # at once: the function has the name of its module
from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.hosts.attach import AttachReport, attach_check, host_kinds, register_host
    from mmattn.hosts.causal_lm.model import AdaptedCausalLM
    from mmattn.hosts.diffusion.transformer import AdaptedDiffusionTransformer
    from mmattn.hosts.diffusion.unet import AdaptedUNet
    from mmattn.hosts.encoder import AdaptedEncoder
    from mmattn.hosts.encoder_decoder import AdaptedEncoderDecoder
    from mmattn.hosts.loading import load, load_prefix_tuning, load_published
    from mmattn.hosts.model import AdaptedModel, CallOptions
    from mmattn.kv_store.passages import PassageCache

__all__ = [
    "AdaptedCausalLM",
    "AdaptedDiffusionTransformer",
    "AdaptedEncoder",
    "AdaptedEncoderDecoder",
    "AdaptedModel",
    "AdaptedUNet",
    "AttachReport",
    "CallOptions",
    "PassageCache",
    "attach",
    "attach_check",
    "host_kinds",
    "load",
    "load_prefix_tuning",
    "load_published",
    "register_host",
]

__getattr__, __dir__ = lazy_exports(__name__)
