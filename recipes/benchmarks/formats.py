"""Formats for vectors on a disk: blocks of 16 MB read from shards of safetensors, Arrow IPC and Lance.

    python -m recipes.benchmarks formats

Each format holds the same random vectors in half precision. What the system has cached of the files is dropped before
each reading, dd reads the raw bytes in each round, and every page of every block is looked at. Arrow and Lance are left
out where they are not installed (pip install 'mmattn[lance]').
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recipes.benchmarks import cold_files
from recipes.benchmarks.store import PLACE, WIDTH
from recipes.benchmarks.timing import ratio, timed

BLOCKS, QUICK_BLOCKS = 256, 8
SLOTS = (16 << 20) // (2 * WIDTH)  # of a block
SHARD = 32  # blocks
"""512 MB."""


def measure(blocks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Rates of each format as a share of dd's on the raw bytes, in order and in random order of the blocks."""
    PLACE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="formats-", dir=PLACE))
    try:
        return _measured(folder, blocks, rounds)
    finally:
        shutil.rmtree(folder)


def _measured(folder: Path, blocks: int, rounds: int) -> dict[str, dict[str, float]]:
    raw = _write_raw(folder, blocks)
    ways: dict[str, tuple[list[Path], Callable[[list[int]], object]]] = {"dd": (raw, lambda order: cold_files.dd(raw))}
    ways |= _safetensors(folder, blocks)
    if importlib.util.find_spec("pyarrow"):
        ways |= _arrow(folder, blocks)
    if importlib.util.find_spec("lance"):
        ways |= _lance(folder, blocks)
    orders = {"in order": list(range(blocks)), "mixed": random.Random(0).sample(range(blocks), blocks)}
    times: dict[str, dict[str, list[float]]] = {order: {name: [] for name in ways} for order in orders}
    left = 0.0
    for turn in range(rounds):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            files, read = ways[name]
            for order, numbers in orders.items():
                cold_files.drop(files)
                left = max(left, cold_files.cached(files))
                times[order][name].append(timed(lambda read=read, numbers=numbers: read(numbers)))
    if left > 0.01:
        print(f"caches could not be dropped: {left:.0%} of a file was still in memory, so these figures are not cold")
    found: dict[str, dict[str, float]] = {}
    for name, (files, _) in ways.items():
        size = sum(file.stat().st_size for file in files)
        found[name] = {f"share of dd's rate, {order}": ratio(times[order], "dd", name) for order in orders}
        found[name]["GB/s in order, median"] = size / 1e6 / sorted(times["in order"][name])[rounds // 2]
        found[name]["bytes for each of the vectors'"] = size / (blocks * (16 << 20))
    return found


def _block(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SLOTS, WIDTH, generator=generator).half()


def _look(block: torch.Tensor) -> int:
    """Touch every page of a block."""
    return int(block.reshape(-1).view(torch.uint8)[::4096].sum())


def _in_threads(read: Callable[[int], torch.Tensor], order: list[int]) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert sum(threads.map(lambda number: _look(read(number)), order)) > 0


def _shards(blocks: int) -> list[range]:
    return [range(start, min(start + SHARD, blocks)) for start in range(0, blocks, SHARD)]


def _write_raw(folder: Path, blocks: int) -> list[Path]:
    files = []
    for number, shard in enumerate(_shards(blocks)):
        files.append(folder / f"raw-{number:03d}")
        with open(files[-1], "wb") as file:
            for one in shard:
                file.write(_block(one).numpy().tobytes())
    return files


def _safetensors(folder: Path, blocks: int) -> dict[str, Any]:
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = [folder / f"{number:03d}.safetensors" for number in range(len(_shards(blocks)))]
    for file, shard in zip(files, _shards(blocks), strict=True):
        save_file({f"{one % SHARD:04d}": _block(one) for one in shard}, file)
    places = []
    for file in files:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        places.append({name: 8 + length + one["data_offsets"][0] for name, one in header.items()})

    def by_range(number: int) -> torch.Tensor:
        shard, name = number // SHARD, f"{number % SHARD:04d}"
        values = torch.empty(SLOTS, WIDTH, dtype=torch.float16)
        with open(files[shard], "rb", buffering=0) as opened:
            os.preadv(opened.fileno(), [values.view(torch.uint8).numpy().data.cast("B")], places[shard][name])
        return values

    def mapped(order: list[int]) -> None:
        opened = [safe_open(file, "pt") for file in files]
        for number in order:
            _look(opened[number // SHARD].get_tensor(f"{number % SHARD:04d}"))

    return {
        "safetensors, ranges by two threads": (files, lambda order: _in_threads(by_range, order)),
        "safetensors, its own mapped reader": (files, mapped),
    }


def _arrow(folder: Path, blocks: int) -> dict[str, Any]:
    import pyarrow

    files = [folder / f"{number:03d}.arrow" for number in range(len(_shards(blocks)))]
    schema = pyarrow.schema([("vectors", pyarrow.list_(pyarrow.float16(), 16 * WIDTH))])
    for file, shard in zip(files, _shards(blocks), strict=True):
        with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
            for one in shard:
                writer.write_batch(pyarrow.record_batch([_as_arrow(_block(one))], schema))

    def read(opened: Any, number: int) -> torch.Tensor:
        return _as_tensor(pyarrow.ipc.open_file(opened).get_batch(number % SHARD).column(0))

    def by_range(number: int) -> torch.Tensor:
        with pyarrow.OSFile(str(files[number // SHARD])) as opened:
            return read(opened, number)

    def mapped(order: list[int]) -> None:
        opened = [pyarrow.memory_map(str(file)) for file in files]
        for number in order:
            _look(read(opened[number // SHARD], number))

    return {
        "Arrow IPC, read by two threads": (files, lambda order: _in_threads(by_range, order)),
        "Arrow IPC, mapped": (files, mapped),
    }


def _lance(folder: Path, blocks: int) -> dict[str, Any]:
    import lance
    import pyarrow

    schema = pyarrow.schema([("vectors", pyarrow.list_(pyarrow.float16(), 16 * WIDTH))])
    entries = SLOTS // 16
    made = (pyarrow.record_batch([_as_arrow(_block(number))], schema) for number in range(blocks))
    place = str(folder / "vectors.lance")
    lance.write_dataset(made, place, schema=schema, max_rows_per_file=SHARD * entries, mode="create")
    files = sorted((folder / "vectors.lance" / "data").iterdir())

    def read(order: list[int]) -> None:
        dataset = lance.dataset(place)
        if order == sorted(order):
            for batch in dataset.scanner(batch_size=entries).to_batches():
                _look(_as_tensor(batch.column(0)))
        else:
            _in_threads(lambda number: _some(dataset, number * entries, entries), order)

    return {"Lance": (files, read)}


def _some(dataset: Any, start: int, count: int) -> torch.Tensor:
    (batch,) = dataset.scanner(offset=start, limit=count, batch_size=count).to_table().to_batches()
    return _as_tensor(batch.column(0))


def _as_arrow(block: torch.Tensor) -> Any:
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(block.reshape(-1).numpy()), 16 * WIDTH)


def _as_tensor(column: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(column.flatten().to_numpy())
