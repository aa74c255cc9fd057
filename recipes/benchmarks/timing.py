"""Timing that survives a noisy machine: all candidates in turn, round by round, compared within each round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, seconds: float = 0.6, least: int = 5, most: int = 400
) -> dict[str, list[float]]:
    """Time each candidate once per round, in an order that rotates, for about `seconds`; milliseconds per call."""
    names = list(candidates)
    for name in names:
        candidates[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    turn = 0
    while turn < least or (turn < most and time.perf_counter() - begin < seconds):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            times[name].append(timed(candidates[name]))
        turn += 1
    return times


def timed(candidate: Callable[[], object]) -> float:
    """Milliseconds of one call, everything it started on the device included."""
    synchronize()
    begin = time.perf_counter()
    candidate()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(times: Mapping[str, list[float]], name: str, to: str) -> float:
    """How long `name` takes for each unit of `to`: the median over rounds of the ratio within the round."""
    return statistics.median(own / other for own, other in zip(times[name], times[to], strict=True))
