"""Whether a program was interrupted, also where something in it caught that to save what it has."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def recorded_interrupts() -> Iterator[list[int]]:
    """Record each Ctrl-C inside the block, which raises KeyboardInterrupt as ever.

    The list that it gives stays empty outside the main thread, and where interrupts are ignored or already handled.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
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
