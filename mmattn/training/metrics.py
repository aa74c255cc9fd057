"""The metrics of a run as JSON lines and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from mmattn.storage.atomic import write_text

COLUMNS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "eval_loss", "seconds")

# Names in the lines of the first format.
_RENAMED: dict[str, str] = {"lr": "learning_rate", "gradient_norm": "grad_norm", "held_out_loss": "eval_loss"}


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
        earlier = [line for line in _read(self.lines) if line.get("step", math.inf) <= step] if step else []
        write_text(self.lines, "".join(json.dumps(line) + "\n" for line in earlier))
        write_text(self.table, "".join(_cells(line) for line in [dict(zip(COLUMNS, COLUMNS, strict=True)), *earlier]))

    def log(self, **figures: Any) -> None:
        """Append a line to both files; numbers that are not finite become null, and only `COLUMNS` go into the CSV."""
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
    """The complete lines: a process killed while it wrote leaves half a one."""
    found: list[Any] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [_renamed(line) for line in found if isinstance(line, dict)]


def _renamed(line: dict[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in line.items()}
