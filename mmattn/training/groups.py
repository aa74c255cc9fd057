"""Parameter groups of an optimizer, and gradient checkpointing of adapter blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from mmattn.errors import ConfigError
from mmattn.training.lower_layers import wrapped_forwards


def parameter_groups(
    module: nn.Module,
    learning_rate: float,
    *,
    gate_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
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
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
        {"params": gates, "lr": gate_rate, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("no parameter of this module is trained; set requires_grad on those that should be")
    return groups


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
    adapters = getattr(model, "adapters", None)
    if not adapters:
        raise ConfigError(f"{type(model).__name__} has no adapters to checkpoint: attach one")
    blocks = [block for adapter in adapters.values() for block in adapter.blocks.values()]
    with wrapped_forwards(blocks, lambda block: partial(_checkpointed, block.forward)):
        yield


def _checkpointed(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
