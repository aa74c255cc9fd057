"""Progress of long work: a bar on a terminal, ten plain lines in all where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator


def tracked(total: int, label: str, progress: bool = True, note: Callable[[], str] = lambda: "") -> Iterator[int]:
    """0 … total - 1 with a bar on a terminal, and with ten plain lines in all where there is none."""
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
    """Where each batch of `size` begins, tracked.

    >>> list(batches(7, 3, "encoding", progress=False))
    [0, 3, 6]
    """
    for number in tracked(-(-total // size), label, progress):
        yield number * size
