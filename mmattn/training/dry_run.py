"""A run that stops after a few measured steps and says what the whole of it would take."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Steps that are measured; one more comes first, in which memory is allocated and kernels are chosen.
MEASURED = 10
_ASKED: ContextVar[bool] = ContextVar("mmattn_dry_run", default=False)


class DryRunEnded(Exception):
    """Raised by `train` inside `dry_run`; the message is the cost of the whole run."""


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside the block `train` measures its first steps and raises `DryRunEnded` with the cost of the whole run."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


def is_dry_run() -> bool:
    """True inside a `dry_run` block."""
    return _ASKED.get()


def cost(
    model: nn.Module, label: str, rows: int, steps: int, seconds: float, waiting: float, accelerator: Accelerator
) -> str:
    """Return the cost of a training run as text, from the seconds of a step and the share that waits for rows."""
    parameters, processes = list(model.parameters()), accelerator.num_processes
    trained = [one for one in parameters if one.requires_grad]
    weights = sum(one.nbytes for one in parameters) / 1e9
    # AdamW has two moments for each weight.
    state = 3 * sum(one.nbytes for one in trained) / 1e9
    return (
        f"{label}: {sum(one.numel() for one in trained):,} of {sum(one.numel() for one in parameters):,} parameters "
        f"are trained\n"
        f"bytes on {accelerator.device}: {weights:.2f} GB of weights, {state:.2f} GB of gradients and moments, "
        f"{_peak(accelerator.device) / 1e9:.2f} GB at most so far\n"
        f"steps: {steps:,} of {rows} rows in {processes} process{'es' * (processes > 1)}, {seconds:.2f} s each, of "
        f"which {100 * waiting:.1f} % waiting for rows\n"
        f"time: {steps * seconds / 3600:.2f} hours, without evaluations"
    )


def _peak(device: torch.device) -> int:
    """Return the bytes that this process has used at most, of the device or of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
