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
    found: list[Any] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in found if isinstance(line, dict)]


def _numbers(line: Mapping[str, Any]) -> list[str]:
    return [name for name, value in line.items() if isinstance(value, (int, float))]
