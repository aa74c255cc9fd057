"""The loop that both parts train with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mmattn import training

from .settings import Config


def fit(
    config: Config,
    model: nn.Module,
    trained: nn.Module,
    compute_loss: Callable[[int], torch.Tensor],
    steps: int,
    label: str,
    run: training.RunFolder | None,
) -> float:
    """Train a part of a model with the settings of the run, which keeps the metrics where it is given; seconds."""
    optim = config.optim
    model.train()
    fitted = training.fit(
        training.parameter_groups(
            trained, optim.learning_rate, gate_learning_rate=optim.gate_learning_rate, weight_decay=optim.weight_decay
        ),
        compute_loss,
        steps,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        label=label,
        log=None if run is None else lambda line: run.log(model=label, **line),
        progress=config.progress,
    )
    model.eval()
    return fitted.seconds
