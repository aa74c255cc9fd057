"""The rates of encoding memories into a store, and of reading it, in order and mixed.

    python -m recipes.benchmarks store

A million rows of random vectors, 16 slots of width 256 in half precision (about 8 GB), are written through
`encode_rows` and read as training reads them. The system's cache of the files is dropped before each reading, and dd
reads the same files in each round. The files are written to runs/benchmarks and removed again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import training
from recipes.benchmarks.timing import Rows, Tables, megabytes, ratio, timed

ROWS, QUICK_ROWS = 1_000_000, 20_000
SLOTS, WIDTH, BATCH = 16, 256, 256
PROBES = 64  # places of a file that are looked for in memory
PLACE = Path("runs/benchmarks")


class RandomVectors:
    """An encoder that costs nothing: each passage has other vectors of one large table."""

    dim, fingerprint = WIDTH, "random vectors"

    def __init__(self) -> None:
        self.table = torch.randn((1 << 16) + SLOTS, WIDTH, generator=torch.Generator().manual_seed(0))

    def __call__(self, passages: list[str], batch_size: int) -> mmattn.Memory:
        starts = torch.tensor([int(passage) * 7919 % (1 << 16) for passage in passages])
        return mmattn.Memory(self.table[starts[:, None] + torch.arange(SLOTS)], check_finite=False)


class Examples(list[training.Row]):
    """`count` rows, each made on access."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        return training.Row(f"What row {number} says of its picture.", passages=(str(number),))

    def __iter__(self) -> Iterator[training.Row]:
        return (self[number] for number in range(self.count))


def measure(count: int = ROWS, rounds: int = 3) -> Rows:
    """Return the rates of a store of so many rows, as a share of dd's, the cost of writing, and memory."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="store-", dir=PLACE) as name:
        folder = Path(name)
        begin = time.perf_counter()
        store = training.encode_rows(Examples(count), folder, passages=RandomVectors(), batch_size=BATCH, progress=True)
        writing = time.perf_counter() - begin
        files = sorted(folder.glob("vectors-*"))
        size = sum(file.stat().st_size for file in files)
        in_order, mixed = (training.EncodedBatches(store, BATCH, shuffle=shuffle) for shuffle in (False, True))
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "dd": lambda: dd(files),
            "in order, checksums compared": lambda: epoch(
                training.EncodedBatches(training.EncodedDataset(folder), BATCH, shuffle=False)
            ),
            "in order, a later epoch": lambda: epoch(in_order),
            "mixed": lambda: epoch(mixed),
            "mixed, memories stacked": lambda: epoch(mixed, store),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        left, memory = 0.0, dict.fromkeys(ways, (0.0, 0.0))
        for turn in range(rounds):
            names = list(ways)
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                left = max(left, drop_cache(files))
                growth: list[tuple[float, float]] = []
                times[way].append(timed(lambda way=way, growth=growth: growth.append(ways[way]())))
                memory[way] = max(memory[way], growth[0])
    if left > 0.01:
        print(f"these figures are not cold: {left:.0%} of the files was still in the system's cache")
    rows = {
        way: {
            "share of dd's rate": ratio(times, "dd", way),
            "GB/s, median": size / 1e6 / sorted(times[way])[rounds // 2],
        }
        for way in ways
    }
    for way in list(ways)[1:]:
        rows[way] |= {"MB in memory, first half": memory[way][0], "second half": memory[way][1]}
    rows["written by encode_rows"] = {"GB/s, median": size / 1e9 / writing, "rows a second": count / writing}
    return rows


def dd(files: Sequence[Path]) -> tuple[float, float]:
    """Read files with dd, sixteen megabytes at a time."""
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M"], stderr=subprocess.DEVNULL, check=True)
    return 0.0, 0.0


def epoch(batches: training.EncodedBatches, memories: training.EncodedDataset | None = None) -> tuple[float, float]:
    """Go through an epoch; return the most megabytes by which the process grew in its first and second half."""
    before, most, rows = megabytes("RssAnon"), [0.0, 0.0], 0
    for number, batch in enumerate(batches.epoch(0)):
        rows += len(batch)
        if memories is not None:
            assert memories.of(batch) is not None
        if number % 16 == 0:
            half = 2 * number // batches.batches_per_epoch
            most[half] = max(most[half], megabytes("RssAnon") - before)
    assert rows == len(batches.dataset)
    return most[0], most[1]


def drop_cache(files: Sequence[Path]) -> float:
    """Drop the system's cache of files (POSIX_FADV_DONTNEED); return the share that is still in memory."""
    os.sync()
    hits = 0
    for file in files:
        handle, size = os.open(file, os.O_RDONLY), file.stat().st_size
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            for place in range(PROBES):
                with contextlib.suppress(BlockingIOError):
                    hits += os.preadv(handle, [bytearray(1)], size * place // PROBES, os.RWF_NOWAIT)
        finally:
            os.close(handle)
    return hits / (PROBES * len(files))


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield a store, as a share of the rate at which dd reads its files."""
    yield "Store: rows of 16 slots of width 256, cold", "what", measure(*((QUICK_ROWS, 1) if quick else ()))
