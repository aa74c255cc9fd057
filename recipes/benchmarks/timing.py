"""Timing that survives a noisy machine: all candidates in turn, round by round, compared within each round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

Rows = dict[str, dict[str, float]]
#: Parts of the output: a title, the heading of the first column, and the rows of a table.
Tables = Iterator[tuple[str, str, Rows]]


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, seconds: float = 0.6, least: int = 5, most: int = 400
) -> dict[str, list[float]]:
    """Time each candidate once per round, in an order that rotates, for about `seconds`; milliseconds per call."""
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    with without_default_device():
        for name in names:
            candidates[name]()
        begin = time.perf_counter()
        turn = 0
        while turn < least or (turn < most and time.perf_counter() - begin < seconds):
            for offset in range(len(names)):
                name = names[(turn + offset) % len(names)]
                times[name].append(timed(candidates[name]))
            turn += 1
    return times


@contextmanager
def without_default_device() -> Iterator[None]:
    """Inside the block torch has no default device: with one, every call of torch passes through Python."""
    device = torch.get_default_device()
    if device.type == "cpu":
        yield
        return
    torch.set_default_device(None)
    try:
        yield
    finally:
        torch.set_default_device(device)


def timed(candidate: Callable[[], object]) -> float:
    """Return the milliseconds of one call, with everything it started on the device."""
    synchronize()
    begin = time.perf_counter()
    candidate()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(times: Mapping[str, list[float]], name: str, to: str) -> float:
    """Return the time of `name` for each unit of `to`: the median over rounds of the ratio within the round."""
    return statistics.median(one / other for one, other in zip(times[name], times[to], strict=True))


def ratios(times: Mapping[str, list[float]], to: str) -> dict[str, float]:
    """Return the time of each candidate for each unit of `to`."""
    return {name: ratio(times, name, to) for name in times}


def megabytes(field: str) -> float:
    """Return a memory figure of this process: "VmRSS" now, "VmHWM" at its peak, "RssAnon" without files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024 / 1e6


def name_of(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def plural(count: int, noun: str) -> str:
    """Return "1 row" or "8 rows"."""
    return f"{count:,} {noun}{'s' if count > 1 else ''}"
