"""Gradient checkpointing of the adapters: less memory for a second forward of each block in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mmattn.errors import ConfigError


@contextlib.contextmanager
def gradient_checkpointing(model: Any) -> Iterator[None]:
    """Gradient checkpointing (arXiv 1604.06174) of every block of every adapter, inside this context.

    The gradients are the same bit for bit. The host has a setting of its own:
    `model.activation_checkpointing_enable()`.

    Args:
        model: what `mmattn.attach` returned.

    Raises:
        ConfigError: the model has no adapters.
    """
    blocks = trained_blocks("gradient_checkpointing", model)
    compiled = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = partial(_checkpointed, block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, compiled, strict=True):
            del block.__dict__["forward"]
            if forward is not None:
                block.forward = forward


def trained_blocks(setting: str, model: Any) -> list[Any]:
    """The blocks of all adapters of a model.

    Args:
        setting: that asks for them, in the message.
        model: what `mmattn.attach` returned.

    Raises:
        ConfigError: the model has no adapters.
    """
    adapters = getattr(model, "adapters", None)
    if not adapters:
        raise ConfigError(
            f"{setting} is for adapters, and {type(model).__name__} has none: attach one, or set it to False"
        )
    return [block for adapter in adapters.values() for block in adapter.blocks.values()]


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
