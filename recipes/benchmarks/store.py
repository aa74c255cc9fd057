"""Memories in shards: how fast they are encoded into a store, and read from it, in order and mixed.

    python -m recipes.benchmarks store

A million rows of random vectors, 16 slots of width 256 in half precision (about 8 GB), are written through
`encode_rows` and read as training reads them. What the system has cached of the files is dropped before each reading,
and dd reads the same files in each round. The files are written to runs/benchmarks and removed again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import training
from recipes.benchmarks import cold_files
from recipes.benchmarks.timing import ratio, timed

ROWS, QUICK_ROWS = 1_000_000, 20_000
SLOTS, WIDTH, BATCH = 16, 256, 256
PLACE = Path("runs/benchmarks")


class RandomVectors:
    """An encoder that costs nothing: every passage has other vectors of one large table."""

    dim, fingerprint = WIDTH, "random vectors"

    def __init__(self) -> None:
        self.table = torch.randn((1 << 16) + SLOTS, WIDTH, generator=torch.Generator().manual_seed(0))

    def __call__(self, passages: list[str], batch_size: int) -> mmattn.Memory:
        starts = torch.tensor([int(passage) * 7919 % (1 << 16) for passage in passages])
        return mmattn.Memory(self.table[starts[:, None] + torch.arange(SLOTS)], check_finite=False)


class Rows(list[training.Row]):
    """As many rows as asked for, each made when it is asked for."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        return training.Row(f"What row {number} says of its picture.", passages=(str(number),))

    def __iter__(self) -> Iterator[training.Row]:
        return (self[number] for number in range(self.count))


def measure(count: int = ROWS, rounds: int = 3) -> dict[str, dict[str, float]]:
    """Rates of a store of so many rows, as a share of dd's; what its writing took; what it holds in memory."""
    PLACE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=PLACE))
    try:
        begin = time.perf_counter()
        store = training.encode_rows(Rows(count), folder, passages=RandomVectors(), batch_size=BATCH, progress=True)
        writing = time.perf_counter() - begin
        files = sorted(folder.glob("vectors-*"))
        size = sum(file.stat().st_size for file in files)
        ways = _ways(folder, store)
        times: dict[str, list[float]] = {name: [] for name in ways}
        left, memory = 0.0, dict.fromkeys(ways, (0.0, 0.0))
        for turn in range(rounds):
            names = list(ways)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                cold_files.drop(files)
                left = max(left, cold_files.cached(files))
                grown: list[tuple[float, float]] = []
                times[name].append(timed(lambda name=name, grown=grown: grown.append(ways[name]())))
                memory[name] = max(memory[name], grown[0])
    finally:
        shutil.rmtree(folder)
    if left > 0.01:
        print(
            f"caches could not be dropped: {left:.0%} of the files were still in memory, so these figures are not cold"
        )
    found = {
        name: {
            "share of dd's rate": ratio(times, "dd", name),
            "GB/s, median": size / 1e6 / sorted(times[name])[rounds // 2],
            "MB in memory, first half": memory[name][0],
            "second half": memory[name][1],
        }
        for name in ways
    }
    found["dd"] = {name: found["dd"][name] for name in list(found["dd"])[:2]}
    found["written by encode_rows"] = {"GB/s, median": size / 1e9 / writing, "rows a second": count / writing}
    return found


def _ways(folder: Path, store: training.EncodedDataset) -> dict[str, Callable[[], tuple[float, float]]]:
    """What is timed; each gives the megabytes that it needed at most, in its first and in its second half."""
    files = sorted(folder.glob("vectors-*"))
    in_order = training.EncodedBatches(store, BATCH, shuffle=False)
    mixed = training.EncodedBatches(store, BATCH)
    memories = store

    def dd() -> tuple[float, float]:
        cold_files.dd(files)
        return 0.0, 0.0

    def first() -> tuple[float, float]:
        return _epoch(training.EncodedBatches(training.EncodedDataset(folder), BATCH, shuffle=False))

    return {
        "dd": dd,
        "in order, checksums compared": first,
        "in order, a later epoch": lambda: _epoch(in_order),
        "mixed": lambda: _epoch(mixed),
        "mixed, memories stacked": lambda: _epoch(mixed, memories),
    }


def _epoch(batches: training.EncodedBatches, memories: training.EncodedDataset | None = None) -> tuple[float, float]:
    """Go through an epoch; megabytes by which the process grew at most, in its first and in its second half."""
    before, most, rows = cold_files.resident(), [0.0, 0.0], 0
    for number, batch in enumerate(batches.epoch(0)):
        rows += len(batch)
        if memories is not None:
            assert memories.of(batch) is not None
        if number % 16 == 0:
            half = 2 * number // batches.batches_per_epoch
            most[half] = max(most[half], cold_files.resident() - before)
    assert rows == len(batches.dataset)
    return most[0], most[1]
