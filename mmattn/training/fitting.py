"""A plain training loop over a function that computes a loss: for recipes that draw their own batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import NonFiniteError, check_float, check_int
from mmattn.progress import tracked
from mmattn.training.optimization import learning_rate_factor


@dataclass
class FitResult:
    """What `fit` did.

    Attributes:
        steps: of the optimizer.
        seconds: of wall-clock time.
        losses: one per step.
        interrupted: whether Ctrl-C ended it early.
    """

    steps: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    interrupted: bool = False


def fit(
    groups: Sequence[dict[str, Any]],
    compute_loss: Callable[[int], Tensor],
    max_steps: int,
    *,
    warmup_steps: int = 0,
    max_grad_norm: float | None = 1.0,
    label: str = "training",
    log: Callable[[dict[str, float]], None] | None = None,
    logging_steps: int = 20,
    progress: bool = True,
) -> FitResult:
    """Train parameter groups with AdamW, a linear warm-up and a cosine schedule.

    Ctrl-C ends the run between two steps and returns what was reached; nothing is raised.

    Args:
        groups: what `parameter_groups` returned.
        compute_loss: from the step, counted from 0, to a scalar loss.
        max_steps: steps of the optimizer.
        warmup_steps: steps over which the learning rate rises linearly.
        max_grad_norm: L2 norm to which the gradient is clipped; None does not clip.
        label: what stands before the progress bar.
        log: is given {"step", "loss", "learning_rate"}, the loss a mean, every `logging_steps` steps and at the last.
        logging_steps: steps between two calls of `log`.
        progress: show a progress bar.

    Raises:
        ConfigError: a number out of its range.
        NonFiniteError: the loss is NaN or infinite; the weights are those before that step.
    """
    check_int("max_steps", max_steps)
    check_int("warmup_steps", warmup_steps, at_least=0)
    check_int("logging_steps", logging_steps)
    if max_grad_norm is not None:
        check_float("max_grad_norm", max_grad_norm, at_least=0)
    optimizer = torch.optim.AdamW(list(groups), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, max_steps, warmup_steps)
    )
    parameters = [parameter for group in groups for parameter in group["params"]]
    done, began = FitResult(), time.perf_counter()
    try:
        for step in tracked(max_steps, label, progress, lambda: f"loss {_mean(done.losses[-logging_steps:]):.3f}"):
            loss = compute_loss(step)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the loss is {value} at step {step}; lower the learning rate (now {schedule.get_last_lr()[0]:.2e})"
                )
            optimizer.zero_grad(set_to_none=True)
            # A batch without a memory reaches no adapter: there is nothing to learn from it.
            if loss.requires_grad:
                loss.backward()
            if max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            optimizer.step()
            done.steps, used = step + 1, float(schedule.get_last_lr()[0])
            done.losses.append(value)
            schedule.step()
            if log is not None and (done.steps % logging_steps == 0 or done.steps == max_steps):
                log({"step": done.steps, "loss": _mean(done.losses[-logging_steps:]), "learning_rate": used})
    except KeyboardInterrupt:
        done.interrupted = True
    done.seconds = time.perf_counter() - began
    return done


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
