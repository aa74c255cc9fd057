"""Train on a store that is read at 50 MB/s, and print the share of the time of the steps that was spent waiting for it.

    python -m tests.stress.throttled_reading [STEPS]

A tiny host learns from rows of 256 slots of width 768 in half precision, and a step takes as long as that of a device
which asks for 30 MB/s, or longer where this machine is slower. The store is read from the disk; at an address of fsspec
behind which all threads share 50 MB/s, with whole blocks read ahead and twice as many batches as an epoch's first
window takes to arrive; and at that address row by row, with nothing ahead, which has to wait. Prints the shares, and
exits with 1 if one of the first two is above 2 %, if the last is not above 20 %, or if the losses differ.
"""

from __future__ import annotations

import math
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

import mmattn
from mmattn import training
from tests.training import small_run

RATE = 50e6
"""Bytes a second of the reader."""
ASKED = 30e6
"""Bytes a second that the steps ask for, at most."""
SLOTS, WIDTH, BATCH, EPOCHS = 256, 768, 8, 3
STEP = BATCH * SLOTS * WIDTH * 2 / ASKED
BLOCK_BYTES = 4 << 20
WINDOW = 40e6
"""Bytes of rows that are mixed at a time, at most: a run waits for the first of them to arrive."""


class ThrottledFiles(fsspec.AbstractFileSystem):
    """The files of this machine behind a line that all threads share."""

    protocol = "throttled"
    _lock = threading.Lock()
    _free = 0.0  # when the line is free again

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """The files of a folder."""
        return LocalFileSystem().ls(self._strip_protocol(path), detail=detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Bytes of a file, after the time that they take."""
        found = bytes(LocalFileSystem().cat_file(self._strip_protocol(path), start=start, end=end, **options))
        with self._lock:
            done = max(time.monotonic(), ThrottledFiles._free) + len(found) / RATE
            ThrottledFiles._free = done
        time.sleep(max(0.0, done - time.monotonic()))
        return found


def make_store(folder: Path, rows: int) -> training.EncodedDataset:
    """A store of rows with random memories."""
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(SLOTS + rows, WIDTH, generator=chance)
    given = [
        training.Row("abcdefgh"[: 2 + number % 7], memory=mmattn.Memory(table[None, number : number + SLOTS]))
        for number in range(rows)
    ]
    return training.encode_rows(given, folder, block_bytes=BLOCK_BYTES)


def train(store: training.EncodedDataset, batches: Any, steps: int, ahead: int) -> tuple[float, float, float]:
    """Train on some batches, of which so many are fetched ahead."""
    model = small_run.attach(memory_dim=WIDTH)
    collator = training.RowCollator(small_run.Letters(), store)

    def loss(batch: training.TextBatch, seeds: Sequence[int]) -> Any:
        begin = time.perf_counter()
        found = training.sum_nats(model, batch)
        time.sleep(max(0.0, STEP - (time.perf_counter() - begin)))
        return found

    seen: list[dict[str, Any]] = []
    done = training.train(
        model,
        loss,
        batches,
        training.TrainingConfig(max_steps=steps, logging_steps=steps, dataloader_prefetch_factor=ahead),
        training.make_accelerator(device="cpu"),
        collate=lambda rows, seeds: collator.batch(rows),
        log=lambda **figures: seen.append(figures),
        progress=False,
    )
    return float(seen[-1]["waiting"]), float(seen[-1]["loss"]), steps * STEP * ASKED / done.seconds


def main(steps: int = 600) -> int:
    disk, throttled, alone, losses = measure(steps)
    return int(max(disk, throttled) > 0.02 or alone < 0.2 or len(losses) > 1)


def measure(steps: int) -> tuple[float, float, float, set[float]]:
    """Train on the store in all three ways, and print their figures."""
    fsspec.register_implementation(ThrottledFiles.protocol, ThrottledFiles, clobber=True)
    rows = max(1, steps // EPOCHS) * BATCH
    with tempfile.TemporaryDirectory() as place:
        store = make_store(Path(place) / "store", rows)
        far = training.EncodedDataset(f"{ThrottledFiles.protocol}://{store.address}")
        window = max(BLOCK_BYTES, int(min(WINDOW, store.row_bytes * rows / 8)))
        ahead = 2 * math.ceil(window / RATE / STEP)
        mixed = [training.EncodedBatches(one, BATCH, buffer_bytes=window) for one in (store, far)]
        (disk, loss, used), (throttled, same, given) = (train(one.dataset, one, steps, ahead) for one in mixed)
        alone, *_ = train(far, training.RowBatches(far, BATCH), steps, 0)
    print(
        f"{steps} steps over {rows} rows ({store.row_bytes * rows / 1e6:.0f} MB): waiting {disk:.2%} of the time on "
        f"disk ({used / 1e6:.0f} MB/s used), {throttled:.2%} at {RATE / 1e6:.0f} MB/s ({given / 1e6:.0f} used) "
        f"with {ahead} batches and {window / 1e6:.0f} MB of rows ahead, {alone:.0%} there with nothing ahead"
    )
    return disk, throttled, alone, {loss, same}


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
