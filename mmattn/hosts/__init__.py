"""Frozen models that gain a memory: `attach` joins, `load` and `load_published` join with weights from files."""

from mmattn.hosts.adapted import AdaptedModel
from mmattn.hosts.attach import attach
from mmattn.hosts.attach_check import AttachReport, attach_check
from mmattn.hosts.causal_lm.model import AdaptedCausalLM
from mmattn.hosts.causal_lm.prefix_tuning import load_prefix_tuning, save_prefix_tuning
from mmattn.hosts.diffusion_transformer.model import AdaptedDiffusionTransformer
from mmattn.hosts.encoder.model import AdaptedEncoder
from mmattn.hosts.encoder_decoder.model import AdaptedEncoderDecoder
from mmattn.hosts.load import load, load_published
from mmattn.hosts.passages.cache import PassageCache
from mmattn.hosts.registry import host_kinds, register_host
from mmattn.hosts.unet.model import AdaptedUNet

__all__ = [
    "AdaptedCausalLM",
    "AdaptedDiffusionTransformer",
    "AdaptedEncoder",
    "AdaptedEncoderDecoder",
    "AdaptedModel",
    "AdaptedUNet",
    "AttachReport",
    "PassageCache",
    "attach",
    "attach_check",
    "host_kinds",
    "load",
    "load_prefix_tuning",
    "load_published",
    "register_host",
    "save_prefix_tuning",
]
