"""Parameter groups, learning-rate schedules, compiled and checkpointed adapter blocks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmattn.core.key_value_projection import KeyValueProjection
from mmattn.errors import ConfigError
from mmattn.training.lower_layers import wrapped_forwards

#: The share of the learning rate that is left, from 1 to 0, when a share from 0 to 1 of the steps after the warm-up is
#: done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}

Groups = list[dict[str, Any]]
"""Parameter groups of a torch optimizer."""


def parameter_groups(
    module: nn.Module,
    learning_rate: float,
    *,
    gate_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> Groups:
    """Return parameter groups for a torch optimizer, of the parameters of a module that require gradients.

    Args:
        module: whose parameters are trained.
        learning_rate: of all parameters but the gates.
        gate_learning_rate: of the gates, which start at 0; None for `learning_rate`.
        weight_decay: of matrices; vectors and gates have none.

    Raises:
        ConfigError: no parameter of the module requires gradients.
    """
    gates: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            last = name.rsplit(".", 1)[-1]
            (gates if last == "gate" else matrices if parameter.dim() > 1 else vectors).append(parameter)
    gate_rate = learning_rate if gate_learning_rate is None else gate_learning_rate
    groups: Groups = [
        {"params": matrices, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
        {"params": gates, "lr": gate_rate, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("no parameter of this module is trained; set requires_grad on those that should be")
    return groups


def learning_rate_factor(step: int, max_steps: int, warmup_steps: int, lr_scheduler_type: str = "cosine") -> float:
    """The factor of the learning rate at a step: linear warm-up, then one of `SCHEDULES`.

    "cosine" and "linear" go down to a hundredth, "constant" stays at 1.

    Args:
        step: from 0.
        max_steps: steps in all.
        warmup_steps: steps over which the factor rises to 1.
        lr_scheduler_type: a key of `SCHEDULES`.

    >>> {name: [round(learning_rate_factor(step, 101, 1, name), 2) for step in (0, 1, 26, 100)] for name in SCHEDULES}
    {'cosine': [1.0, 1.0, 0.85, 0.01], 'linear': [1.0, 1.0, 0.75, 0.01], 'constant': [1.0, 1.0, 1.0, 1.0]}
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps))
    return 0.01 + 0.99 * SCHEDULES[lr_scheduler_type](done)


@contextlib.contextmanager
def compiled_blocks(model: nn.Module, backend: str = "inductor") -> Iterator[None]:
    """Inside this context every block of every adapter is compiled, for text of any length.

    The attention over the memory itself is left to the kernels that it has: it computes on no padding, and so would be
    compiled again for each length of a memory. Weights are inputs of the graphs, which see every step of the optimizer.
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
        vars(reader)["attend"] = torch.compiler.disable(reader.attend)
    try:
        with wrapped_forwards(blocks, lambda block: torch.compile(block.forward, dynamic=True, backend=backend)):
            yield
    finally:
        for reader in readers:
            del vars(reader)["attend"]


@contextlib.contextmanager
def gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing (arXiv 1604.06174) of every block of every adapter, inside this context.

    The gradients are the same bit for bit. The host has a setting of its own:
    `model.activation_checkpointing_enable()`.

    Args:
        model: what `mmattn.attach` returned.

    Raises:
        ConfigError: the model has no adapters.
    """
    blocks = trained_blocks("gradient_checkpointing", model)
    with wrapped_forwards(blocks, lambda block: partial(_checkpointed, block.forward)):
        yield


def trained_blocks(setting: str, model: nn.Module) -> list[nn.Module]:
    """The blocks of all adapters of a model."""
    adapters = getattr(model, "adapters", None)
    if not adapters:
        raise ConfigError(
            f"{setting} is for adapters, and {type(model).__name__} has none: attach one, or set it to False"
        )
    return [block for adapter in adapters.values() for block in adapter.blocks.values()]


def _checkpointed(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
