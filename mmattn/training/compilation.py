"""`torch.compile` of what is trained: the blocks of adapters, but for their attention over the memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mmattn.core.key_value_projection import KeyValueProjection
from mmattn.errors import ConfigError
from mmattn.training.activation_checkpointing import trained_blocks


@contextlib.contextmanager
def compiled_blocks(model: Any, backend: str = "inductor") -> Iterator[None]:
    """Inside this context every block of every adapter is compiled, for text of any length.

    The attention over the memory itself is left to the kernels that it has: it computes on no padding, and so would be
    compiled again for each length of a memory. Weights are inputs of the graphs, which see every step of the optimizer.

    Args:
        model: what `mmattn.attach` returned.
        backend: of `torch.compile`.

    Raises:
        ConfigError: the model has no adapters, or one whose blocks are attention alone.
    """
    blocks = trained_blocks("torch_compile", model)
    for block in blocks:
        if isinstance(block, KeyValueProjection) or type(block).forward is nn.Module.forward:
            raise ConfigError(
                f"torch_compile was asked for, and {type(block).__name__} of this adapter is attention over the memory "
                "alone, which keeps its own kernels: nothing is left to compile. Set it to False"
            )
    readers = [part for block in blocks for part in block.modules() if hasattr(type(part), "attend")]
    for reader in readers:
        reader.__dict__["attend"] = torch.compiler.disable(reader.attend)
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
    try:
        yield
    finally:
        for reader in readers:
            del reader.__dict__["attend"]
        for block in blocks:
            del block.__dict__["forward"]
