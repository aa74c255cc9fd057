"""Hosts sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): every process goes the whole way, forward and back.

All processes gather a layer's weights together, when it is called and again when gradients pass it. So one that has no
row left, or no memory in its rows and therefore nothing to learn, must not stay behind: the others would wait for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError


def shards(host: nn.Module) -> list[Any]:
    """The parts of a host whose weights lie in pieces on several processes; none where it is whole.

    >>> shards(nn.Linear(5, 3))
    []
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody loaded it, nothing is sharded
    return [] if fsdp is None else [part for part in host.modules() if isinstance(part, fsdp.FSDPModule)]


def reshard(host: nn.Module) -> None:
    """Put every weight back in pieces: a call leaves some whole, as parameters that the next one forgets."""
    for part in shards(host):
        part.reshard()


def check_trained(model: nn.Module) -> None:
    """Refuse trained parameters that lie in pieces: each process must have all of what it learns.

    Raises:
        ConfigError: one does.
    """
    reshard(model)
    pieces = [name for name, p in model.named_parameters() if p.requires_grad and hasattr(p, "full_tensor")]
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
