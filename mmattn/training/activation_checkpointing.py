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
    `model.gradient_checkpointing_enable()`.

    Args:
        model: what `mmattn.attach` returned.

    Raises:
        ConfigError: the model has no adapters.
    """
    adapters = getattr(model, "adapters", None)
    if not adapters:
        raise ConfigError(
            f"gradient_checkpointing is for adapters, and {type(model).__name__} has none: attach one, or set it to "
            "False"
        )
    blocks = [block for adapter in adapters.values() for block in adapter.blocks.values()]
    for block in blocks:
        block.forward = partial(_checkpointed, type(block).forward, block)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _checkpointed(forward: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, **kwargs)
