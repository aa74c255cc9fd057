"""The cost of a run, measured on its first steps: `mmattn train --dry-run`."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

MEASURED = 10
"""Steps of a dry run that are measured; one more comes first, in which memory is allocated and kernels are chosen."""
_DRY_RUN: ContextVar[bool] = ContextVar("mmattn_dry_run", default=False)


class DryRunEnded(Exception):
    """Raised by a training inside `dry_run`; the message is the cost of the whole run."""


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside the block `RunFolder.train` measures its first steps and raises `DryRunEnded` with the cost of the run.

    It reads their batches and trains the model: give it a stream and a model of its own.
    """
    token = _DRY_RUN.set(True)
    try:
        yield
    finally:
        _DRY_RUN.reset(token)


def is_dry_run() -> bool:
    """Return True inside a `dry_run` block."""
    return _DRY_RUN.get()


def cost(
    model: nn.Module, label: str, rows: int, steps: int, seconds: float, processes: int, device: torch.device
) -> str:
    """Return the cost of a training as text, from the seconds of a step of so many rows."""
    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    weights = sum(one.nbytes for one in parameters) / 1e9
    # AdamW has two moments for each weight.
    state = 3 * sum(one.nbytes for one in trained) / 1e9
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return (
        f"{label}: {sum(one.numel() for one in trained):,} of {sum(one.numel() for one in parameters):,} parameters "
        f"are trained\n"
        f"bytes on {device}: {weights:.2f} GB of weights, {state:.2f} GB of gradients and moments, "
        f"{peak / 1e9:.2f} GB at most so far\n"
        f"steps: {steps:,} of {rows} rows in {processes} process{'es' * (processes > 1)}, {seconds:.2f} s each\n"
        f"time: {steps * seconds / 3600:.2f} hours, without evaluations"
    )


class CostForecast(TrainerCallback):
    """Ends a training after a few steps, and raises `DryRunEnded` with the cost of the whole.

    Args:
        label: of the training.
    """

    def __init__(self, label: str) -> None:
        self.label = label

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the measurement; the second step begins it anew."""
        if state.global_step < 2:
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """End the measurement after the last measured step."""
        steps, last = state.global_step, min(state.max_steps, 1 + MEASURED)
        if steps == last:
            seconds = (time.perf_counter() - self.began) / max(1, steps - 1)
            rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            raise DryRunEnded(cost(model, self.label, rows, state.max_steps, seconds, args.world_size, args.device))
