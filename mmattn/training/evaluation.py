"""The loss of held-out rows, shared between processes: their mean, and what their own memories save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.data.rows import Row
from mmattn.data.sampling import derive_seed, split_between_processes
from mmattn.hosts.interop.quantised import stored
from mmattn.hosts.interop.sharded import shards
from mmattn.training.config import Collate, Loss
from mmattn.training.distributed import Processes

if TYPE_CHECKING:
    from accelerate import Accelerator

GROUPS = 8
"""Batches that held-out rows make at least where there are so many: the spread between them is the noise of a loss."""


def mean_loss(
    model: nn.Module,
    loss: Loss,
    rows: Sequence[Row],
    batch_size: int,
    accelerator: Accelerator,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    *,
    collate: Collate | None = None,
) -> float:
    """Return the mean of a loss over all targets of these rows, in evaluation mode; processes share the rows.

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
    steps = gradient_accumulation_steps
    return evaluate(model, loss, rows, (), batch_size, accelerator, steps, seed, collate=collate)["eval_loss"]


def evaluate(
    model: nn.Module,
    loss: Loss,
    rows: Sequence[Row],
    shuffled_rows: Sequence[Row],
    batch_size: int,
    accelerator: Accelerator,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    *,
    collate: Collate | None = None,
) -> dict[str, float]:
    """Return `mean_loss` of rows as "eval_loss", and the loss of `shuffled_rows`.

    "eval_loss_shuffled" is the loss of the same rows with other rows' memories, and "memory_gain_stderr" the standard
    error of the difference of the two, from its spread between batches (paired, as in arXiv 2411.00640).
    """
    processes = Processes.of(model, accelerator)
    size = max(1, batch_size // (gradient_accumulation_steps * processes.count))
    if len(shuffled_rows):
        size = min(size, math.ceil(len(rows) / (GROUPS * processes.count)))
    losses = _batch_losses(model, loss, rows, size, processes, seed, collate)
    metrics = {"eval_loss": _mean(losses)}
    if len(shuffled_rows):
        other = _batch_losses(model, loss, shuffled_rows, size, processes, seed, collate)
        metrics |= {"eval_loss_shuffled": _mean(other), "memory_gain_stderr": _stderr(losses, other)}
    return metrics


def loss_of(
    loss: Loss, batch: object, seeds: Sequence[int], collate: Collate | None, accelerator: Accelerator
) -> tuple[Tensor, int | Tensor]:
    """Return the loss of a batch under autocast, on the accelerator's device where the batch was collated."""
    from accelerate.utils import send_to_device

    if collate is not None:
        batch = send_to_device(batch, accelerator.device, non_blocking=accelerator.device.type == "cuda")
    with accelerator.autocast():
        return loss(batch, seeds)


def sums_of(total: Tensor, count: int | Tensor) -> Tensor:
    """Return the sum of losses and the number of targets of a micro-batch (2,), without waiting for a device."""
    wide = torch.float64 if total.device.type in ("cpu", "cuda") else torch.float32
    counted = count.to(total.device) if isinstance(count, Tensor) else torch.full_like(total, count, dtype=wide)
    return torch.stack([total.detach().to(wide), counted.detach().to(wide)])


@torch.no_grad()
def _batch_losses(
    model: nn.Module,
    loss: Loss,
    rows: Sequence[Row],
    size: int,
    processes: Processes,
    seed: int,
    collate: Collate | None,
) -> Tensor:
    """Sum of the losses and number of the targets (batches, 2) of each batch of all processes."""
    was_training = model.training
    model.eval()
    seeded = [(rows[i], derive_seed(seed, "held out", i)) for i in range(len(rows))]
    accelerator = processes.accelerator
    (share,) = split_between_processes(seeded, processes.index, processes.count)
    longest = math.ceil(len(rows) / processes.count)
    sums = torch.zeros(processes.count, math.ceil(longest / size), 2, dtype=torch.float64)
    for number, start in enumerate(range(0, longest if shards(model) else len(share), size)):
        part = share[start : start + size]
        examples, seeds = zip(*(part or seeded[:1]), strict=True)
        batch = list(examples) if collate is None else collate(examples, seeds)
        with stored(model):
            total, count = loss_of(loss, batch, seeds, collate, accelerator)
        if part:
            sums[processes.index, number] = sums_of(total, count)
    model.train(was_training)
    return torch.tensor(processes.sum(sums), dtype=torch.float64).flatten(0, 1)


def _mean(sums: Tensor) -> float:
    losses, targets = sums.sum(0).tolist()
    return float(losses / max(1.0, targets))


def _stderr(own: Tensor, other: Tensor) -> float:
    """The standard error of the difference of the means of two losses over the same batches; nan of fewer than two."""
    targets = own[:, 1]
    batches = int((targets > 0).sum())
    if batches < 2:
        return math.nan
    differences = other[:, 0] - own[:, 0]
    # A batch with more targets weighs more: the error of a ratio of two sums.
    residuals = differences - targets * differences.sum() / targets.sum()
    return float((residuals.square().sum() * batches / (batches - 1)).sqrt() / targets.sum())
