"""What a language model of transformers says of itself: its sizes, its embeddings, where its weights are."""

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
    """Width d of the hidden states by the config.

    Raises:
        AttachError: the config does not say.
    """
    width = getattr(text_config(lm), "hidden_size", None)
    if not isinstance(width, int):
        raise AttachError(f"the config of {type(lm).__name__} has no hidden_size: is it a language model?")
    return width


def embeddings_of(lm: nn.Module) -> nn.Module:
    """The embeddings of a model's tokens, the model itself where it does not say."""
    get_embeddings: Any = getattr(lm, "get_input_embeddings", None)
    embeddings: nn.Module = lm if get_embeddings is None else get_embeddings()
    return embeddings


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight, the CPU where it has none or is offloaded."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device
