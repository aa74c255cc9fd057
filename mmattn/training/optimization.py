"""What the optimizer is given: groups of parameters, and the learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from mmattn.errors import ConfigError

#: The share of the learning rate that is left, from 1 to 0, when a share from 0 to 1 of the steps after the warm-up is
#: done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}


def parameter_groups(
    module: nn.Module,
    learning_rate: float,
    *,
    gate_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer, of the parameters of a module that require gradients.

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
