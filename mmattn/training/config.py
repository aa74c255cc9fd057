"""Settings of a training run, its result, and the type of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmattn.data.rows import Row
from mmattn.data.sampling import Batches, EpochBatches
from mmattn.errors import ConfigError, check_bool, check_choice, check_float, check_int
from mmattn.training.optimization import SCHEDULES

Loss = Callable[[Any, Sequence[int]], tuple[Tensor, int | Tensor]]
"""From the rows of a batch, or what `Collate` made of them, and a seed for each row, to the sum of the losses of all
targets, and the number of targets: a tensor where an int would have to be read from a device."""
Collate = Callable[[Sequence[Row], Sequence[int]], object]
"""From the rows of a batch and a seed for each to what the loss is given in their place. It runs in a thread beside the
training, and must draw random numbers from the seeds alone. What it gives is moved to the device: a tensor, an object
with `to`, or dicts and lists of them."""


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of `train`, in the words of `transformers.TrainingArguments` where both have them.

    Args:
        max_steps: steps of the optimizer; None where `num_train_epochs` is given.
        num_train_epochs: epochs, over data that has a length; None where `max_steps` is given.
        gradient_accumulation_steps: micro-batches that a process splits its share of a batch into. The batch itself
            does not grow: its size is that of `RowBatches`, over all processes and micro-batches.
        learning_rate: of AdamW, at the end of the warm-up.
        gate_learning_rate: that of the gates; None for `learning_rate`.
        weight_decay: of AdamW, on matrices only.
        warmup_steps: steps over which the learning rate rises linearly.
        lr_scheduler_type: of the learning rate after the warm-up: "cosine", "linear" or "constant".
        max_grad_norm: L2 norm to which the gradient is clipped; None does not clip.
        ema_decay: decay of an exponential moving average of the weights, which is then what is evaluated and saved; 0
            for none.
        calibrate: a fresh gated adapter is first calibrated by the first batch, see `AdaptedModel.calibrate`.
        gradient_checkpointing: compute the activations of the adapters again in the backward pass.
        torch_compile: compile the blocks of the adapters; results differ by rounding, also between the process that was
            interrupted and the one that resumes.
        eval_steps: steps between two evaluations; 0 never evaluates.
        early_stopping_patience: evaluations without a lower loss that end the run, with the best weights; 0 never.
        save_steps: steps between two checkpoints.
        save_total_limit: checkpoints that stay on the disk.
        logging_steps: steps between two lines of metrics, each a mean over those steps.
        dataloader_prefetch_factor: batches that are fetched and collated ahead, in a thread beside the training; 0
            fetches each when it is needed.
        seed: of order, dropout and noise.

    Raises:
        ConfigError: a value out of its range, or settings that contradict each other.
    """

    max_steps: int | None = None
    num_train_epochs: float | None = None
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    gate_learning_rate: float | None = None
    weight_decay: float = 0.0
    warmup_steps: int = 0
    lr_scheduler_type: str = "cosine"
    max_grad_norm: float | None = 1.0
    ema_decay: float = 0.0
    calibrate: bool = True
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    eval_steps: int = 0
    early_stopping_patience: int = 0
    save_steps: int = 100
    save_total_limit: int = 2
    logging_steps: int = 20
    dataloader_prefetch_factor: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.num_train_epochs is None):
            raise ConfigError(
                f"give max_steps or num_train_epochs, one of them; got max_steps={self.max_steps} and "
                f"num_train_epochs={self.num_train_epochs}"
            )
        if self.max_steps is not None:
            check_int("max_steps", self.max_steps)
        if self.num_train_epochs is not None and check_float("num_train_epochs", self.num_train_epochs) <= 0:
            raise ConfigError(f"num_train_epochs must be above 0, got {self.num_train_epochs}")
        for name in ("gradient_accumulation_steps", "save_steps", "save_total_limit", "logging_steps"):
            check_int(name, getattr(self, name))
        counts = ("warmup_steps", "eval_steps", "early_stopping_patience", "dataloader_prefetch_factor", "seed")
        for name in counts:
            check_int(name, getattr(self, name), at_least=0)
        for name in ("learning_rate", "gate_learning_rate", "weight_decay", "max_grad_norm"):
            if getattr(self, name) is not None or name in ("learning_rate", "weight_decay"):
                check_float(name, getattr(self, name), at_least=0)
        check_float("ema_decay", self.ema_decay, at_least=0, below=1)
        check_choice("lr_scheduler_type", self.lr_scheduler_type, tuple(SCHEDULES))
        check_bool("calibrate", self.calibrate)
        check_bool("gradient_checkpointing", self.gradient_checkpointing)
        check_bool("torch_compile", self.torch_compile)
        if self.early_stopping_patience and not self.eval_steps:
            raise ConfigError("early_stopping_patience counts evaluations: set eval_steps, too")


@dataclass
class TrainingResult:
    """Result of a training run.

    Attributes:
        global_step: steps of the optimizer since the beginning of the run, also where it was resumed.
        epoch: number of the epoch, from 0.
        batch_in_epoch: batches of that epoch that are done.
        eval_loss: that of the last evaluation; nan where there was none.
        best_eval_loss: the lowest one; inf where there was none.
        best_global_step: the step of the lowest one.
        evals_without_improvement: evaluations since then.
        stopped_early: whether early stopping ended the run.
        interrupted: whether Ctrl-C ended it.
        seconds: of this process.
        resumed_from_step: the step of the checkpoint where this process began; 0 where it began anew.
    """

    global_step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    eval_loss: float = math.nan
    best_eval_loss: float = math.inf
    best_global_step: int = 0
    evals_without_improvement: int = 0
    stopped_early: bool = False
    interrupted: bool = False
    seconds: float = 0.0
    resumed_from_step: int = 0


def total_steps(config: TrainingConfig, batches: Batches) -> int:
    """Steps of the optimizer from the first to the last epoch."""
    if config.max_steps is not None:
        return config.max_steps
    assert config.num_train_epochs is not None
    if isinstance(batches, EpochBatches):
        per_epoch = batches.batches_per_epoch
    else:
        per_epoch = len(batches) if isinstance(batches, Sized) else None
    if per_epoch is None:
        raise ConfigError("a stream has no length, so epochs cannot be counted in steps: give max_steps")
    return max(1, round(config.num_train_epochs * per_epoch))
