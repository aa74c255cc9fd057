"""Sizes, embeddings and device of a language model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmattn.errors import AttachError


def text_config(lm: nn.Module) -> Any:
    """The part of a model's config that describes its text decoder, or None."""
    config: Any = getattr(lm, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def depth_of(lm: nn.Module) -> int | None:
    """Number of decoder layers by the config, or None."""
    return getattr(text_config(lm), "num_hidden_layers", None)


def width_of(lm: nn.Module) -> int:
    """Width d of the hidden states by the config."""
    width = getattr(text_config(lm), "hidden_size", None)
    if not isinstance(width, int):
        raise AttachError(f"the config of {type(lm).__name__} has no hidden_size: is it a language model?")
    return width


def embeddings_of(lm: nn.Module) -> nn.Module:
    """The embeddings of a model's tokens, the model itself where it does not say."""
    get_embeddings: Any = getattr(lm, "get_input_embeddings", None)
    try:
        embeddings: nn.Module = lm if get_embeddings is None else get_embeddings()
    except NotImplementedError:  # as models of several codebooks say
        return lm
    return embeddings


def device_of(module: nn.Module) -> torch.device:
    """The device a module computes on: that of its first weight; of an offloaded one that to which it is brought."""
    first = next(module.parameters(), None)
    if first is not None and first.device.type != "meta":
        return first.device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "cpu"))
