"""The metrics of a run as JSON lines and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.storage.files import write_text
from mmattn.training.trackers import log_to_trackers

COLUMNS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "eval_loss", "seconds")
"""Columns that every table begins with."""


class Metrics:
    """`metrics.jsonl` and `metrics.csv` of a run, one line per call.

    Args:
        folder: of the run.
        step: of the checkpoint from which a run is resumed: lines of later steps are dropped, as they come again. 0
            empties both files.
        name: of the files, without their endings.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0, name: str = "metrics") -> None:
        self.lines, self.table = Path(folder) / f"{name}.jsonl", Path(folder) / f"{name}.csv"
        earlier = [line for line in read_metrics(self.lines) if line.get("step", math.inf) <= step] if step else []
        write_text(self.lines, "".join(json.dumps(line) + "\n" for line in earlier))
        self._write_table(earlier)

    def log(self, **figures: Any) -> None:
        """Append a line to both files; numbers that are not finite become null, and texts go into the JSON alone.

        Args:
            **figures: by name.
        """
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        with open(self.lines, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
        if set(_numbers(plain)) <= set(self.columns):
            with open(self.table, "a", encoding="utf-8", newline="") as file:
                file.write(self._cells(plain))
        else:
            self._write_table(read_metrics(self.lines))

    def _write_table(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """The whole table, with a column for every figure of these lines."""
        self.columns = list(dict.fromkeys((*COLUMNS, *(name for line in lines for name in _numbers(line)))))
        head = dict(zip(self.columns, self.columns, strict=True))
        write_text(self.table, "".join(self._cells(line) for line in (head, *lines)))

    def _cells(self, line: Mapping[str, Any]) -> str:
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerow([line.get(name, "") for name in self.columns])
        return written.getvalue()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The complete lines of a `metrics.jsonl`; a process killed while it wrote leaves half a one.

    Args:
        path: of the file; where there is none, there are no lines.
    """
    records: list[Any] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in records if isinstance(line, dict)]


def _numbers(line: Mapping[str, Any]) -> list[str]:
    return [name for name, value in line.items() if isinstance(value, (int, float))]


class MetricsLog:
    """Write metrics to `metrics.jsonl`, `metrics.csv` and the trackers, and print the warning of `memory_warning`.

    Args:
        accelerator: what `make_accelerator` returned; only its first process writes.
        folder: of the run.
        step: of the checkpoint from which the run is resumed, as in `Metrics`.
        name: of the files, without their endings.
        prefix: of the figures in trackers.
        targets: unit of the throughput, such as "tokens".
    """

    def __init__(
        self,
        accelerator: Any,
        folder: str | os.PathLike[str],
        step: int = 0,
        *,
        name: str = "metrics",
        prefix: str = "adapter",
        targets: str = "targets",
    ) -> None:
        self.accelerator, self.prefix, self.targets = accelerator, prefix, targets
        self.path = Path(folder) / f"{name}.jsonl"
        self.metrics = Metrics(folder, step, name) if accelerator.is_main_process else None

    def __call__(self, **figures: Any) -> None:
        """Write the metrics of a step.

        Args:
            **figures: by name, as `train` gives them.
        """
        if self.metrics is None:
            return
        named = {name.replace("targets_per_", f"{self.targets}_per_"): value for name, value in figures.items()}
        self.metrics.log(**named)
        log_to_trackers(self.accelerator, self.prefix, named.pop("step"), named)
        if (warning := memory_warning(read_metrics(self.path))) is not None:
            self.accelerator.print(f"{self.prefix}: {warning}")


PATIENCE = 3
"""Evaluations in a row that must agree."""
ERRORS = 2.0
"""Standard errors that a gain must exceed to be one."""


def memory_warning(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Warn after the last evaluation if the adapter ignores its memory, or say that it no longer does.

    A memory does nothing where the loss on held-out rows is no higher with the memories of other rows, by more than two
    standard errors, in three evaluations in a row. That is said once; and once more when it is no longer so.

    Args:
        lines: of metrics, as `read_metrics` returns them; evaluations have "eval_loss", "eval_loss_shuffled" and
            "memory_gain_stderr".

    >>> noise = [{"step": n, "eval_loss": 2.5, "eval_loss_shuffled": 2.5, "memory_gain_stderr": 0.1} for n in (1, 2, 3)]
    >>> memory_warning(noise[:2]) is None
    True
    >>> print(memory_warning(noise)[:55])
    the adapter ignores its memory so far: in 3 evaluations
    """
    if not lines or "eval_loss_shuffled" not in lines[-1]:
        return None
    ignored = [_is_ignored(line) for line in lines if "eval_loss_shuffled" in line]
    streak, before, last = _streak(ignored), _streak(ignored[:-1]), lines[-1]
    losses = f"{last['eval_loss']:.4f} with its own memory, {last['eval_loss_shuffled']:.4f} with another row's"
    if streak == PATIENCE:
        return (
            f"the adapter ignores its memory so far: in {PATIENCE} evaluations up to step {last['step']} the loss of "
            f"held-out rows was no higher with the memories of other rows ({losses}). See gate/ and memory_attention/ "
            "in the metrics; and whether the texts can be told from these memories at all, by a linear probe for "
            "instance"
        )
    if not streak and before >= PATIENCE:
        return f"the adapter uses its memory from step {last['step']} on ({losses})"
    return None


def _streak(flags: Sequence[bool]) -> int:
    """Return the length of the run of true values at the end."""
    return next((count for count, one in enumerate(reversed(flags)) if not one), len(flags))


def _is_ignored(line: Mapping[str, Any]) -> bool:
    eval_loss, other, error = (line.get(name) for name in ("eval_loss", "eval_loss_shuffled", "memory_gain_stderr"))
    if eval_loss is None or other is None:
        return False
    # Of a single batch no error is known: then only what is equal to rounding is.
    return bool(other - eval_loss <= (1e-6 * abs(eval_loss) if error is None else ERRORS * error))
