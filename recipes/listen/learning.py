"""Shared by both parts: rows that are drawn on the fly, the adapter of the settings, the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import training

from .settings import AdapterSettings, Config, OptimSettings

Draw = Callable[[Random, float], Any]
"""From random numbers, and the share of the training that is done, to a row."""
Loss = Callable[[Sequence[Any], Sequence[int]], Tensor]
"""From rows and a seed for each to their mean loss."""


class Lesson:
    """A run's folder, device and seed, and the training of the parameters that are not frozen."""

    def __init__(self, config: Config, run: training.RunFolder) -> None:
        self.config, self.run = config, run
        self.device = config.lm.arguments(config).device

    def train(self, model: Any, loss: Loss, draw: Draw, optim: OptimSettings, label: str) -> float:
        """Train on rows from `draw`; return the seconds."""
        count = optim.max_steps * optim.per_device_train_batch_size

        def collate(numbers: Sequence[int]) -> dict[str, Any]:
            randoms = [Random(f"{self.config.seed} {label} {number}") for number in numbers]
            rows = [draw(random, number / count) for random, number in zip(randoms, numbers, strict=True)]
            return {"rows": rows, "seeds": [random.getrandbits(63) for random in randoms]}

        class LossTrainer(training.AdapterTrainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
                return loss(inputs["rows"], inputs["seeds"])

        arguments = optim.arguments(
            self.config,
            warmup_steps=min(optim.warmup_steps, optim.max_steps // 2),
            train_sampling_strategy="sequential",
        )
        trainer = LossTrainer(
            model,
            arguments,
            data_collator=collate,
            train_dataset=range(count),
            gate_learning_rate=optim.gate_learning_rate,
        )
        # The next model starts from the same random numbers, whatever was trained before it.
        with torch.random.fork_rng():
            return self.run.train(trainer, label, self.config.progress)


def make_adapter(settings: AdapterSettings, memory_dim: int) -> mmattn.GatedAdapter:
    """Return the adapter of the settings, for memories of width `memory_dim`."""
    options = settings.model_dump(exclude={"memory_norm"})
    return mmattn.GatedAdapter(memory_dim=memory_dim, layout={"memory_norm": settings.memory_norm}, **options)
