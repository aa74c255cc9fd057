"""Progress of long loops: a bar on a terminal, otherwise ten plain lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator


def tracked(total: int, label: str, progress: bool = True, note: Callable[[], str] = lambda: "") -> Iterator[int]:
    """Iterate over 0 … total - 1 and show the progress on stderr.

    Args:
        total: number of steps.
        label: before the progress.
        progress: show it.
        note: called for text after the progress, such as the current loss.
    """
    if not progress:
        yield from range(total)
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=label, dynamic_ncols=True) as bar:
            for step in range(total):
                yield step
                bar.update()
                bar.set_postfix_str(note(), refresh=False)
    else:
        began = time.perf_counter()
        for step in range(total):
            yield step
            if (step + 1) * 10 // total != step * 10 // total:
                seconds = time.perf_counter() - began
                print(f"{label} {step + 1}/{total} {note()} {seconds:.0f} s", file=sys.stderr, flush=True)


def batches(total: int, size: int, label: str, progress: bool = True) -> Iterator[int]:
    """Iterate over the first index of each batch, and show the progress on stderr.

    Args:
        total: number of rows.
        size: rows of a batch.
        label: before the progress.
        progress: show it.

    >>> list(batches(7, 3, "encoding", progress=False))
    [0, 3, 6]
    """
    for number in tracked(-(-total // size), label, progress):
        yield number * size
