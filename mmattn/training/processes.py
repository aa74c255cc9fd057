"""One process or many: the accelerator of a run, what its first process writes down, and a clean end of all."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from mmattn.errors import ConfigError, check_choice, import_extra
from mmattn.storage.atomic import write_text

COLUMNS = ("step", "epoch", "loss", "lr", "gradient_norm", "held_out_loss", "seconds")


def make_accelerator(
    folder: str | os.PathLike[str] | None = None,
    *,
    precision: str = "no",
    device: str = "auto",
    trackers: tuple[str, ...] = (),
) -> Any:
    """The `accelerate.Accelerator` of this process: one of many under torchrun, alone otherwise.

    Args:
        folder: where trackers write. precision: "no", "bf16" or "fp16". device: "auto", or "cpu" whatever there is.
        trackers: those of accelerate besides the metrics, which are always written: "tensorboard", …

    Raises:
        ConfigError: a precision this device does not have, a tracker that is not installed, or several processes that
            would not know of each other.
    """
    check_choice("precision", precision, ("no", "bf16", "fp16"))
    check_choice("device", device, ("auto", "cpu"))
    accelerate = import_extra("accelerate", "train")
    cpu = device == "cpu" or not torch.accelerator.is_available()
    given: dict[str, Any] = {"cpu": cpu, "mixed_precision": precision}
    if trackers:
        there = sorted(name.value for name in accelerate.tracking.get_available_trackers())
        if lacking := sorted(set(trackers) - set(there)):
            raise ConfigError(
                f"the tracker {lacking[0]!r} is not installed, or accelerate does not know it; there are: "
                f"{', '.join(there) or 'none'}. Metrics are written as JSON lines and CSV in any case"
            )
        given |= {"log_with": list(trackers), "project_dir": None if folder is None else str(folder)}
    _forget_last(accelerate)
    try:
        made = accelerate.Accelerator(**given)
    except ValueError as error:
        raise ConfigError(f"precision={precision}: {error}") from error
    if precision != "no" and not made.native_amp:
        # accelerate leaves fp16 on the CPU out without a word.
        raise ConfigError(f"precision={precision} is not to be had on {made.device.type}: use bf16 there, or no")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != made.num_processes:
        raise ConfigError(
            f"{launched} processes were launched and this one knows of {made.num_processes}: each would train alone. "
            "Launch with torchrun --nproc-per-node N -m mmattn train CONFIG"
        )
    if trackers:
        made.init_trackers("tensorboard" if trackers == ("tensorboard",) else "mmattn")
    return made


def finish(accelerator: Any) -> None:
    """Wait for the others, write out what was printed, close the trackers, leave the group."""
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    sys.stderr.flush()
    accelerator.end_training()


def _forget_last(accelerate: Any) -> None:
    """A later run in this process may have another precision; the group of processes stays."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerate.state.GradientState._reset_state()


class Metrics:
    """The figures of a run as `metrics.jsonl` and `metrics.csv`, a line each time.

    Args:
        folder: of the run. step: lines of later steps, which a run taken up again makes anew, are dropped.
        name: of the files.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0, name: str = "metrics") -> None:
        self.lines, self.table = Path(folder) / f"{name}.jsonl", Path(folder) / f"{name}.csv"
        kept = [line for line in _read(self.lines) if line.get("step", math.inf) <= step] if step else []
        write_text(self.lines, "".join(json.dumps(line) + "\n" for line in kept))
        write_text(self.table, "".join(_cells(line) for line in [dict(zip(COLUMNS, COLUMNS, strict=True)), *kept]))

    def log(self, **figures: Any) -> None:
        """Append a line to both; numbers that are not finite become null."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        for file, line in ((self.lines, json.dumps(plain) + "\n"), (self.table, _cells(plain))):
            with open(file, "a", encoding="utf-8", newline="") as opened:
                opened.write(line)


def _cells(line: dict[str, Any]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow([line.get(name, "") for name in COLUMNS])
    return written.getvalue()


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole: a process killed while it wrote leaves half a one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in found if isinstance(line, dict)]
