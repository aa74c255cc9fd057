"""The training loop: groups of parameters, warm-up and cosine, a progress bar, a stop that keeps what is there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError, NonFiniteError, check_float, check_int
from mmattn.progress import tracked


@dataclass
class Fitted:
    """What a training run did.

    Attributes:
        steps: made. seconds: on the clock. losses: one per step, in nats per token.
        interrupted: whether Ctrl-C ended it early.
    """

    steps: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    interrupted: bool = False


def parameter_groups(
    module: nn.Module, lr: float, *, gate_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """The trained parameters of a module for an optimiser: gates with a rate of their own, decay on matrices only.

    Raises:
        ConfigError: nothing in the module is trained.
    """
    gates: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            last = name.rsplit(".", 1)[-1]
            (gates if last == "gate" else matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
        {"params": gates, "lr": lr if gate_lr is None else gate_lr, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("no parameter of this module is trained; set requires_grad on those that should be")
    return groups


#: What is left of the rate, from 1 to 0, when a share from 0 to 1 of the steps behind the warm-up is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}


def rate(step: int, steps: int, warmup: int, schedule: str = "cosine") -> float:
    """Share of the learning rate at a step: a line up over `warmup` steps, then one of `SCHEDULES`.

    "cosine" and "linear" go down to a hundredth, "constant" stays.

    >>> {schedule: [round(rate(step, 101, 1, schedule), 2) for step in (0, 1, 26, 100)] for schedule in SCHEDULES}
    {'cosine': [1.0, 1.0, 0.85, 0.01], 'linear': [1.0, 1.0, 0.75, 0.01], 'constant': [1.0, 1.0, 1.0, 1.0]}
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return 0.01 + 0.99 * SCHEDULES[schedule](done)


def fit(
    groups: Sequence[dict[str, Any]],
    loss_at: Callable[[int], Tensor],
    steps: int,
    *,
    warmup: int = 0,
    clip: float | None = 1.0,
    label: str = "training",
    log: Callable[[dict[str, float]], None] | None = None,
    every: int = 20,
    progress: bool = True,
) -> Fitted:
    """Train `groups` with AdamW for `steps` steps on the losses that `loss_at(step)` gives.

    Ctrl-C ends the run between two steps and returns what was reached; nothing is raised.

    Args:
        groups: as `parameter_groups` makes them. warmup: steps over which the rate rises. clip: norm of the gradient.
        label: before the progress. log: takes {"step", "loss", "lr"} every `every` steps. progress: show it.

    Raises:
        NonFiniteError: the loss is not a number any more.
    """
    check_int("steps", steps)
    check_int("warmup", warmup, at_least=0)
    if clip is not None:
        check_float("clip", clip, at_least=0)
    optimiser = torch.optim.AdamW(list(groups), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step, steps, warmup))
    parameters = [parameter for group in groups for parameter in group["params"]]
    done, began = Fitted(), time.perf_counter()
    try:
        for step in tracked(steps, label, progress, lambda: f"loss {_mean(done.losses[-every:]):.3f}"):
            loss = loss_at(step)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the loss is {value} at step {step}; lower the learning rate (now {schedule.get_last_lr()[0]:.2e})"
                )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimiser.step()
            done.steps, used = step + 1, float(schedule.get_last_lr()[0])
            done.losses.append(value)
            schedule.step()
            if log is not None and (done.steps % every == 0 or done.steps == steps):
                log({"step": done.steps, "loss": _mean(done.losses[-every:]), "lr": used})
    except KeyboardInterrupt:
        done.interrupted = True
    done.seconds = time.perf_counter() - began
    return done


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
