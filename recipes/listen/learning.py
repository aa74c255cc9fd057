"""One loop for everything that is trained here: rows drawn without end, a loss, the settings of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import training

from .settings import AdapterSettings, Config, OptimSettings

Loss = Callable[[Sequence[Any], Sequence[int]], tuple[Tensor, int]]


class Lesson:
    """A run's folder, device and seed, and the training of whatever is not frozen in a model."""

    def __init__(self, config: Config, run: training.RunFolder, accelerator: Any) -> None:
        self.config, self.run, self.accelerator = config, run, accelerator

    def train(
        self, model: Any, loss: Loss, draw: Callable[[Random, float], Any], optim: OptimSettings, label: str
    ) -> float:
        """Train, and return the seconds it took.

        Args:
            model: whose weights are trained where they are not frozen.
            loss: from rows and a seed for each to the sum of the losses and the number of targets.
            draw: a row, from a generator and the share of the training that is done.
            optim: how long, and how fast.
            label: of the progress and the metrics.

        Raises:
            KeyboardInterrupt: the training was interrupted.
        """
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
        # What comes next begins as if nothing had been trained before it.
        with torch.random.fork_rng():
            done = training.train(
                model,
                loss,
                batches(),
                config,
                self.accelerator,
                log=lambda **figures: self.run.log(model=label, **figures),
                label=label,
                progress=self.config.progress,
            )
        if done.interrupted:
            raise KeyboardInterrupt
        return done.seconds


def make_adapter(settings: AdapterSettings, memory_dim: int) -> mmattn.GatedAdapter:
    """The adapter of the settings, for memories of width `memory_dim`."""
    given = settings.model_dump()
    return mmattn.GatedAdapter(memory_dim=memory_dim, layout={"memory_norm": given.pop("memory_norm")}, **given)


def plot_losses(run: training.RunFolder) -> None:
    """The loss of each model over its training, as `loss.png`."""
    import json

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4))
    for label in dict.fromkeys(line["model"] for line in lines):
        own = [line for line in lines if line["model"] == label]
        axes.plot([line["step"] for line in own], [line["loss"] for line in own], label=label)
    axes.set(xlabel="step", ylabel="loss in nats per word")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run.path / "loss.png", dpi=110, bbox_inches="tight")
    plt.close(figure)
