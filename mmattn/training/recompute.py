"""Gradient checkpointing of the adapters themselves: less memory for a second forward of each block in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mmattn.errors import ConfigError


@contextlib.contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """Inside the block, what an adapter's blocks compute is not kept for the backward pass but computed again.

    The gradients are the same bit for bit. What the host keeps is the host's own affair:
    `model.gradient_checkpointing_enable()`.

    Args:
        model: what `mmattn.attach` returned.

    Raises:
        ConfigError: there are no adapters to compute again.
    """
    adapters = getattr(model, "adapters", None)
    if not adapters:
        raise ConfigError(f"{type(model).__name__} has no adapters whose blocks could be computed again")
    blocks = [block for adapter in adapters.values() for block in adapter.blocks.values()]
    for block in blocks:
        block.forward = partial(_again, type(block).forward, block)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _again(forward: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, **kwargs)
