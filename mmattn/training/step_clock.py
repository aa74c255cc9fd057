"""How fast a run learns: rows and targets a second, and the share of the time that it waits for its batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StepClock:
    """The time of the steps since the last metrics; that of evaluations and checkpoints does not count."""

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, waited: float) -> None:
        """Count from here.

        Args:
            waited: seconds that the run has waited for batches so far.
        """
        self._began, self._waited, self._aside = time.perf_counter(), waited, 0.0
        self._rows = self._targets = 0.0

    def count(self, rows: int, targets: float) -> None:
        """Count what a step learned.

        Args:
            rows: of all processes.
            targets: of all processes, as the loss counts them: the tokens of a language model.
        """
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
        """Rows and targets a second, and the share of the time spent waiting.

        Args:
            waited: as in `begin`.
        """
        seconds = max(time.perf_counter() - self._began - self._aside, 1e-9)
        return {
            "waiting": round((waited - self._waited) / seconds, 4),
            "rows_per_second": round(self._rows / seconds, 3),
            "targets_per_second": round(self._targets / seconds, 3),
        }
