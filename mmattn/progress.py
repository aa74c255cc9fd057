"""Progress of long loops: a bar on a terminal, otherwise a few plain lines on stderr; and their interruption."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

#: Seconds after which a line is printed before the next tenth is done.
PATIENCE = 60.0


@contextlib.contextmanager
def counted(
    total: int | None, label: str, progress: bool = True, note: Callable[[], str] = lambda: "", first: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show the progress of `total` things on stderr, after each tenth and minute, and give the function that counts."""
    if not progress:
        yield lambda count: None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, initial=first, desc=label, dynamic_ncols=True) as bar:

            def advance_bar(count: int) -> None:
                bar.update(count)
                bar.set_postfix_str(note(), refresh=False)

            yield advance_bar
    else:
        done, began = first, time.perf_counter()
        printed = began

        def advance(count: int) -> None:
            nonlocal done, printed
            before, done, now = done, done + count, time.perf_counter()
            tenth = total is not None and done * 10 // total != before * 10 // total
            if tenth or now - printed > PATIENCE:
                printed = now
                parts = (f"{label} {done}" + ("" if total is None else f"/{total}"), note(), f"{now - began:.0f} s")
                print(" ".join(filter(None, parts)), file=sys.stderr, flush=True)

        yield advance


def tracked(
    total: int,
    label: str,
    progress: bool = True,
    note: Callable[[], str] = lambda: "",
    first: int = 0,
    size: int = 1,
) -> Iterator[int]:
    """Iterate over first … total - 1, or the first index of each batch of a size, and show the progress on stderr.

    `note` gives text after it, such as the loss.
    """
    with counted(total, label, progress, note, first) as advance:
        for start in range(first, total, size):
            yield start
            advance(min(size, total - start))


@contextlib.contextmanager
def recorded_interrupts() -> Iterator[list[int]]:
    """Record each Ctrl-C inside the block, where it is neither ignored nor handled, in the main thread."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    try:
        signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread, which alone is interrupted
        yield interrupts
        return
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
