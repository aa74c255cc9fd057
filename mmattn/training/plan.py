"""How a run is to train, and what it came to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmattn.errors import ConfigError, check_choice, check_float, check_int
from mmattn.training.loop import SCHEDULES
from mmattn.training.order import RowBatches
from mmattn.training.rows import Row

Loss = Callable[[Sequence[Row], Sequence[int]], tuple[Tensor, int]]
"""From rows and a seed for each of them to the sum of the losses of all targets, and how many targets there are."""


@dataclass(frozen=True)
class Tuning:
    """How to train.

    Args:
        steps: of the optimiser; or epochs, over data that has a length. pieces: a batch is learned in so many, one
            after another (gradient accumulation).
        lr, gate_lr, weight_decay: of AdamW; gates have a rate of their own. warmup: steps over which the
            rate rises; schedule: what it does then, "cosine", "linear" or "constant".
        clip: norm of the gradient. ema: decay of averaged weights, which are those measured and kept; 0 for none.
        recompute: the adapters' own activations, instead of keeping them.
        evaluate_every: steps between held-out losses. patience: so many of them without a better one end the run, and
            the best weights are kept; 0 is no early stopping.
        save_every, keep: steps between checkpoints, and how many of them stay. log_every: steps between metrics.
        seed: of order, dropout and noise.
    """

    steps: int | None = None
    epochs: float | None = None
    pieces: int = 1
    lr: float = 1e-3
    gate_lr: float | None = None
    weight_decay: float = 0.0
    warmup: int = 0
    schedule: str = "cosine"
    clip: float | None = 1.0
    ema: float = 0.0
    recompute: bool = False
    evaluate_every: int = 0
    patience: int = 0
    save_every: int = 100
    keep: int = 2
    log_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"give steps or epochs, one of them; got steps={self.steps} and epochs={self.epochs}")
        if self.steps is not None:
            check_int("steps", self.steps)
        if self.epochs is not None and check_float("epochs", self.epochs) <= 0:
            raise ConfigError(f"epochs must be above 0, got {self.epochs}")
        for name, least in (("pieces", 1), ("warmup", 0), ("evaluate_every", 0), ("patience", 0), ("keep", 1)):
            check_int(name, getattr(self, name), at_least=least)
        check_choice("schedule", self.schedule, tuple(SCHEDULES))
        check_int("save_every", self.save_every)
        check_int("log_every", self.log_every)
        check_float("ema", self.ema, at_least=0, below=1)
        if self.patience and not self.evaluate_every:
            raise ConfigError("patience counts held-out losses: set evaluate_every, too")


@dataclass
class Tuned:
    """What a run came to.

    Attributes:
        step: of the optimiser, counted from the beginning of the run, also where it was taken up again.
        held_out: the last held-out loss, nan where none was measured; best: the lowest, at best_step.
        stopped: by early stopping. interrupted: by Ctrl-C. seconds: of this process.
        begun_at: the step of the checkpoint where it was taken up.
    """

    step: int = 0
    epoch: int = 0
    place: int = 0
    held_out: float = math.nan
    best: float = math.inf
    best_step: int = 0
    bad: int = 0
    stopped: bool = False
    interrupted: bool = False
    seconds: float = 0.0
    begun_at: int = 0


def total_steps(tuning: Tuning, batches: RowBatches) -> int:
    """Steps of the optimiser in all.

    Raises:
        ConfigError: epochs of a stream, whose length is not known.
    """
    if tuning.steps is not None:
        return tuning.steps
    assert tuning.epochs is not None
    if batches.per_epoch is None:
        raise ConfigError("a stream has no length, so epochs cannot be counted in steps: give steps")
    return max(1, round(tuning.epochs * batches.per_epoch))
