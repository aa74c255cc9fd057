"""What both stages train with: the loss of one step, and the loop over the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.training_utils import compute_snr
from torch import Tensor, nn

from mmattn import training

from .settings import Config


def denoising_loss(scheduler: Any, predict: Any, clean: Tensor, min_snr: float) -> Tensor:
    """The min-SNR weighted error (arXiv 2303.09556) of the predicted v, or noise, at random time steps."""
    noise = torch.randn_like(clean)
    times = torch.randint(0, scheduler.config.num_train_timesteps, (len(clean),))
    noisy = scheduler.add_noise(clean, noise, times)
    snr = compute_snr(scheduler, times)
    if scheduler.config.prediction_type == "v_prediction":
        wanted, weight = scheduler.get_velocity(clean, noise, times), snr.clamp(max=min_snr) / (snr + 1)
    else:
        wanted, weight = noise, snr.clamp(max=min_snr) / snr
    return (weight * (predict(noisy, times) - wanted).square().mean((1, 2, 3))).mean()


def fit(
    config: Config,
    trained: nn.Module,
    compute_loss: Callable[[int], Tensor],
    label: str,
    run: training.RunFolder | None = None,
) -> training.FitResult:
    """Train a module with the settings of a run, which keeps the metrics where it is given."""
    settings = config.optim
    return training.fit(
        training.parameter_groups(trained, settings.learning_rate, weight_decay=settings.weight_decay),
        compute_loss,
        settings.max_steps,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        label=label,
        log=None if run is None else lambda line: run.log(**line),
        progress=config.progress,
    )
