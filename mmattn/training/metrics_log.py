"""The `log` of a training run: its metrics in files and trackers, and a warning where they give reason for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmattn.training.memory_warning import memory_warning
from mmattn.training.metrics import Metrics, read_metrics
from mmattn.training.trackers import log_to_trackers


class MetricsLog:
    """Writes metrics into `metrics.jsonl` and `metrics.csv` and to the trackers, and prints what `memory_warning` says.

    Args:
        accelerator: what `make_accelerator` returned; only its first process writes.
        folder: of the run.
        step: of the checkpoint from which the run is resumed, as in `Metrics`.
        name: of the files, without their endings.
        prefix: of the figures in trackers.
        targets: what the loss counts, such as "tokens", of which the throughput is told.
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
