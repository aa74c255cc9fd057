"""The mean loss over held-out rows, shared between processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mmattn.hosts.interop.quantised import stored
from mmattn.hosts.interop.sharded import shards
from mmattn.training.prefetch import on_device
from mmattn.training.processes import Processes
from mmattn.training.rows import Row
from mmattn.training.sampling import derive_seed, split_between_processes
from mmattn.training.training_config import Collate, Loss


@torch.no_grad()
def mean_loss(
    model: Any,
    loss: Loss,
    rows: Sequence[Row],
    batch_size: int,
    accelerator: Any,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    *,
    collate: Collate | None = None,
) -> float:
    """The mean of a loss over all targets of these rows, in evaluation mode; processes share the rows.

    Args:
        model: is put into evaluation mode meanwhile.
        loss: see `Loss`.
        rows: of any number.
        batch_size: rows at once, over all processes and micro-batches.
        accelerator: what `make_accelerator` returned.
        gradient_accumulation_steps: micro-batches of a process, as in training.
        seed: of the loss's own noise, the same every time.
        collate: as in `train`.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    seeded = [(rows[i], derive_seed(seed, "held out", i)) for i in range(len(rows))]
    processes = Processes.of(model, accelerator)
    (own,) = split_between_processes(seeded, processes.index, processes.count)
    size = max(1, batch_size // (gradient_accumulation_steps * processes.count))
    longest = math.ceil(len(rows) / processes.count) if shards(model) else len(own)
    for start in range(0, longest, size):
        part = own[start : start + size]
        given, seeds = zip(*(part or seeded[:1]), strict=True)
        batch = list(given) if collate is None else on_device(collate(given, seeds), accelerator.device)
        with accelerator.autocast(), stored(model):
            total, count = loss(batch, seeds)
        if part:
            sums += torch.tensor([float(total), count], dtype=torch.float64)
    model.train(was_training)
    losses, targets = processes.sum(sums)
    return losses / max(1.0, targets)
