"""Training a way, whatever the task, and the loss of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmattn import training

from .memories import Memories
from .settings import OptimSettings
from .ways import Alone, Passages, Prompt, Way


@dataclass(frozen=True)
class Batch:
    """Texts with what they are given to read."""

    ids: Tensor
    mask: Tensor
    labels: Tensor
    memories: Memories | None


def nats(way: Way, batch: Batch, memories: Memories | None) -> Tensor:
    """-log p of each token (b, l - 1), 0 where nothing is asked."""
    logits = way.logits(batch.ids, batch.mask, memories)[:, :-1].float()
    labels = batch.labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def learn(
    way: Way,
    label: str,
    batches: Iterable[list[Any]],
    make: Callable[[Sequence[Any]], Batch],
    optim: OptimSettings,
    seed: int,
    run: training.RunFolder,
    accelerator: Any,
    progress: bool,
) -> float:
    """Train the adapter of a way, and the LoRA beside it; seconds."""
    only_lora = isinstance(way, (Alone, Prompt, Passages))

    def loss(rows: Sequence[Any], seeds: Sequence[int]) -> tuple[Tensor, int]:
        batch = make(rows)
        return nats(way, batch, batch.memories).sum(), int((batch.labels[:, 1:] != -100).sum())

    config = training.TrainingConfig(
        max_steps=optim.max_steps,
        learning_rate=optim.lora_learning_rate if only_lora else optim.learning_rate,
        gate_learning_rate=optim.gate_learning_rate,
        weight_decay=optim.weight_decay,
        warmup_steps=min(optim.warmup_steps, optim.max_steps // 2),
        max_grad_norm=optim.max_grad_norm,
        seed=seed,
    )
    done = training.train(
        way.model,
        loss,
        batches,
        config,
        accelerator,
        log=lambda **figures: run.log(model=label, **figures),
        label=label,
        progress=progress,
    )
    if done.interrupted:
        raise KeyboardInterrupt  # a way that was stopped early would flatter the others
    return done.seconds
