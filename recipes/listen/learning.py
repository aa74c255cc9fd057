"""The training loop of both parts: endless rows, a loss, the settings of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import inspect, training

from .settings import AdapterSettings, Config, OptimSettings

Loss = Callable[[Sequence[Any], Sequence[int]], tuple[Tensor, int]]


class Lesson:
    """A run's folder, device and seed, and the training of the parameters that are not frozen."""

    def __init__(self, config: Config, run: training.RunFolder, accelerator: Any) -> None:
        self.config, self.run, self.accelerator = config, run, accelerator

    def train(
        self, model: Any, loss: Loss, draw: Callable[[Random, float], Any], optim: OptimSettings, label: str
    ) -> float:
        """Train on rows from `draw`, which gets the share of the training that is done; return the seconds."""
        random, steps = Random(f"{self.config.seed} {label}"), optim.max_steps

        def batches() -> Iterator[list[Any]]:
            for step in range(steps):
                yield [draw(random, step / steps) for _ in range(optim.batch_size)]

        config = training.TrainingConfig(
            max_steps=steps,
            learning_rate=optim.learning_rate,
            gate_learning_rate=optim.gate_learning_rate,
            weight_decay=optim.weight_decay,
            warmup_steps=min(optim.warmup_steps, steps // 2),
            max_grad_norm=optim.max_grad_norm,
            seed=self.config.seed,
        )
        # The next model starts from the same random numbers, whatever was trained before it.
        with torch.random.fork_rng():
            return training.train_run(
                self.run, label, model, loss, batches(), config, self.accelerator, progress=self.config.progress
            ).seconds


def make_adapter(settings: AdapterSettings, memory_dim: int) -> mmattn.GatedAdapter:
    """Return the adapter of the settings, for memories of width `memory_dim`."""
    options = settings.model_dump(exclude={"memory_norm"})
    return mmattn.GatedAdapter(memory_dim=memory_dim, layout={"memory_norm": settings.memory_norm}, **options)


def plot_losses(run: training.RunFolder) -> None:
    """Plot the loss of each model as `loss.png`."""
    curves = training.curves_of({run.path.name: [training.read_run(run.path)]}, ["loss"])
    inspect.plot_curves(curves, run.path / "loss.png")
