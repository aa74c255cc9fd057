"""Hosts sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): every process goes the whole way, forward and back.

All processes gather a layer's weights together, when it is called and again when gradients pass it. So one that has no
row left, or no memory in its rows and therefore nothing to learn, must not stay behind: the others would wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError


def is_sharded(model: nn.Module) -> bool:
    """Whether weights of a model lie in pieces on several processes.

    >>> is_sharded(nn.Linear(5, 3))
    False
    """
    return any(_lies_in_pieces(parameter) for parameter in model.parameters())


def _lies_in_pieces(parameter: Tensor) -> bool:
    return hasattr(parameter, "full_tensor")  # what a DTensor has, whose import takes its time


def check_trained(parameters: Mapping[str, Tensor]) -> None:
    """Refuse trained parameters that lie in pieces: each process must have all of what it learns.

    Raises:
        ConfigError: one does.
    """
    pieces = [name for name, parameter in parameters.items() if _lies_in_pieces(parameter)]
    if pieces:
        raise ConfigError(
            f"{len(pieces)} trained parameters are sharded ({pieces[0]}, …), and what is trained must be whole in "
            "every process: shard the frozen host first, then put adapters or a LoRA on it"
        )


@contextlib.contextmanager
def gradients_throughout(model: Any) -> Iterator[None]:
    """Inside the block, gradients go back to the embedded text, so through every layer, whatever the rows have.

    Raises:
        ConfigError: the model does not say where its text is embedded.
    """
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None:
        raise ConfigError(
            f"the host is sharded and {type(model).__name__} names no input embeddings: rows without a memory would "
            "leave the other processes waiting. Train an unsharded host, or a language model of transformers"
        )
    hook = embeddings.register_forward_hook(_ask_gradient)
    try:
        yield
    finally:
        hook.remove()


def _ask_gradient(module: nn.Module, inputs: Any, embedded: Tensor) -> None:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
