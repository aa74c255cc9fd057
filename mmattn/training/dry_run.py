"""A run that stops after a few measured steps and says what the whole of it would take."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: Steps that are measured; one more comes first, in which memory is allocated and kernels are chosen.
MEASURED = 10
_ASKED: ContextVar[bool] = ContextVar("mmattn_dry_run", default=False)


@dataclass(frozen=True)
class DryRun:
    """Cost of a training run, extrapolated from a few steps.

    Args:
        label: of the training.
        trained: parameters that are trained.
        parameters: of the whole model.
        weight_bytes: of all weights in this process.
        state_bytes: of gradients and of the moments of the optimizer in this process.
        peak_bytes: the most that this process has used of its device so far, of a CPU with everything that it loaded.
        device: its device.
        processes: of the run.
        rows: of a step, over all processes.
        steps: of the whole run.
        seconds: of a step.
        waiting: share of that time in which a step waited for its rows.

    >>> print(DryRun("adapter", 5_000, 80_000, 320_000, 60_000, 1_500_000_000, "cpu", 1, 8, 720, 2.5, 0.01))
    adapter: 5,000 of 80,000 parameters are trained
    bytes on cpu: 0.00 GB of weights, 0.00 GB of gradients and moments, 1.50 GB at most so far
    steps: 720 of 8 rows in 1 process, 2.50 s each, of which 1.0 % waiting for rows
    time: 0.50 hours, without evaluations
    """

    label: str
    trained: int
    parameters: int
    weight_bytes: int
    state_bytes: int
    peak_bytes: int
    device: str
    processes: int
    rows: int
    steps: int
    seconds: float
    waiting: float

    def __str__(self) -> str:
        weights, state, peak = (count / 1e9 for count in (self.weight_bytes, self.state_bytes, self.peak_bytes))
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        return (
            f"{self.label}: {self.trained:,} of {self.parameters:,} parameters are trained\n"
            f"bytes on {self.device}: {weights:.2f} GB of weights, {state:.2f} GB of gradients and moments, "
            f"{peak:.2f} GB at most so far\n"
            f"steps: {self.steps:,} of {self.rows} rows in {processes}, {self.seconds:.2f} s each, of which "
            f"{100 * self.waiting:.1f} % waiting for rows\n"
            f"time: {self.steps * self.seconds / 3600:.2f} hours, without evaluations"
        )


class DryRunEnded(Exception):
    """A training was asked for inside `dry_run`, and has been measured.

    Args:
        found: what it would take.
    """

    def __init__(self, found: DryRun) -> None:
        super().__init__(str(found))
        self.found = found


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside the block `train` measures its first steps and raises `DryRunEnded`, with what the whole would take."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


def is_dry_run() -> bool:
    """True inside a `dry_run` block."""
    return _ASKED.get()


def measured(
    model: nn.Module, label: str, seconds: Sequence[float], waited: float, rows: int, steps: int, accelerator: Any
) -> DryRun:
    """Return the cost of a training run."""
    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    device = accelerator.device
    return DryRun(
        label=label,
        trained=sum(one.numel() for one in trained),
        parameters=sum(one.numel() for one in parameters),
        weight_bytes=sum(one.nbytes for one in parameters),
        # AdamW has two moments for each weight.
        state_bytes=3 * sum(one.nbytes for one in trained),
        peak_bytes=_peak(device),
        device=str(device),
        processes=accelerator.num_processes,
        rows=rows,
        steps=steps,
        seconds=statistics.median(seconds),
        waiting=waited / max(sum(seconds), 1e-9),
    )


def _peak(device: torch.device) -> int:
    """Bytes that this process has used at most, of the device or of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class StepClock:
    """The time of the steps since the last metrics; that of evaluations and checkpoints does not count."""

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, waited: float) -> None:
        """Count from here."""
        self._began, self._waited, self._aside = time.perf_counter(), waited, 0.0
        self._rows = self._targets = 0.0

    def count(self, rows: int, targets: float) -> None:
        """Count what a step learned."""
        self._rows, self._targets = self._rows + rows, self._targets + targets

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context whose time does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - began

    def metrics(self, waited: float) -> dict[str, float]:
        """Rows and targets a second, and the share of the time spent waiting."""
        seconds = max(time.perf_counter() - self._began - self._aside, 1e-9)
        return {
            "waiting": round((waited - self._waited) / seconds, 4),
            "rows_per_second": round(self._rows / seconds, 3),
            "targets_per_second": round(self._targets / seconds, 3),
        }
