"""Load and faults at length: nothing is left behind by long use, and stores in databases survive kills and neighbours.

`MMATTN_STRESS=100` repeats everything a hundred times, as the nightly workflow does.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

import mmattn
from mmattn import Index
from mmattn.retrieval import score
from tests import tiny
from tests.retrieval import databases

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TIMES = int(os.environ.get("MMATTN_STRESS", "1"))
WIDTH, LIVING = 31, 97


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def hooks(host: nn.Module) -> int:
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return sum(len(getattr(part, kind)) for part in host.modules() for kind in kinds)


@pytest.mark.parametrize("kind", ["generates", "attaches", "saves"])
def test_nothing_is_left_behind(kind: str, tmp_path: Path) -> None:
    """No tensor and no hook; in the second half of many calls the process grows by less than 4 MB."""
    host, ids = tiny.make("llama"), tiny.text(1)
    model = None if kind == "attaches" else tiny.attach(host)

    def work(number: int) -> None:
        memory = tiny.memory(1, m=101, seed=number)
        if kind == "generates":
            model.generate(ids, memory=memory, max_new_tokens=2, do_sample=False)
        elif kind == "attaches":
            tiny.attach(host)(ids, memory=memory)
            mmattn.hosts.model.adapted(host).unload()
        else:
            model.save_adapter(tmp_path / "adapter")
            mmattn.load(model, tmp_path / "adapter", "again")
            model.delete_adapter("again")

    for number in range(5):
        work(number)
    before, process, sizes = (live_tensors(), hooks(host)), psutil.Process(), []
    for _ in range(2):
        for number in range(3 * TIMES):
            work(5 + number)
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert (live_tensors(), hooks(host)) == before
    assert TIMES < 100 or sizes[1] - sizes[0] < 4 << 20


# Stores


@contextlib.contextmanager
def empty_place(store: str) -> Iterator[str]:
    """An address with an empty index: of a server that ends with the block, or in a folder that goes with it."""
    with contextlib.ExitStack() as stack:
        if store == "pgvector":
            address = stack.enter_context(databases.postgres())
        else:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "index"
            address = str(place) if store == "folder" else f"lance:{place}"
        empty = torch.empty(0, WIDTH)
        Index.build(empty).save(address) if store == "folder" else Index.build(empty, store=address).close()
        yield address


def vector_of(number: int) -> Tensor:
    """(1, e), another for each number, the same in every process."""
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(number))


WRITER = """
import os, sys, torch
from mmattn import Index
from tests.stress.test_stress import vector_of
torch.set_num_threads(1)
address, first = sys.argv[1], int(sys.argv[2])
index = Index.open(address)
for number in range(first, first + 1000):
    index.add(vector_of(number), ids=[f"entry {number}"], texts=[str(number)], metadata=[{"number": number}])
    if os.path.isdir(address):
        index.save(address)
    print(number, flush=True)
"""


@pytest.mark.parametrize("store", ["folder", "pgvector", "lancedb"])
def test_kills_in_stores(store: str, seeded: int) -> None:
    """Invariant 92: what was acknowledged is there, whole and in order, and at most one more."""
    chance, done = random.Random(seeded), 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with empty_place(store) as address:
        for _ in range(min(5, TIMES)):
            command = [sys.executable, "-W", "ignore", "-c", WRITER, address, str(done)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as writer:
                assert writer.stdout is not None
                for _ in range(chance.randrange(1, min(1000, 40 * TIMES))):
                    assert writer.stdout.readline(), "the process did not live until it was killed"
                    done += 1
                writer.send_signal(signal.SIGKILL)
                done += len(writer.stdout.read().splitlines())  # acknowledged before the kill came
                assert writer.wait() == -signal.SIGKILL
            index = Index.open(address)
            assert done <= len(index) <= done + 1
            entries = index.store.get(index.ids)
            for row, name in enumerate(index.ids):
                found = (name, entries.texts[row], entries.metadata[row])
                assert found == (f"entry {row}", str(row), {"number": row})
                assert torch.equal(entries.vectors[row], vector_of(row)[0])
            done = len(index)
            index.close()


def write(address: str, writer: int, seconds: float) -> dict[str, int]:
    """Add, update and delete entries that say a number three times; returns the numbers of those that must be left."""
    index, chance, living, step = Index.open(address), random.Random(writer), dict[str, int](), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step += 1
        number = 2 * step + writer
        columns = {"texts": [str(number)], "metadata": [{"number": number, "third": number % 3}]}
        if len(living) > LIVING:
            gone = chance.choice(list(living))
            index.delete([gone])
            del living[gone]
        elif living and step % 3 == 0:
            name = chance.choice(list(living))
            index.update([name], vector_of(number), **columns)
            living[name] = number
        else:
            name = f"{writer}/{step}"
            index.add(vector_of(number), ids=[name], **columns)
            living[name] = number
    index.close()
    return living


def search(address: str, seed: int, seconds: float) -> tuple[int, int]:
    """Hits, and how many of them were wrong: of parts of several entries, another score, or outside the filter."""
    index, chance, hits, wrong = Index.open(address), random.Random(seed), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        queries = torch.cat([vector_of(-chance.randrange(1, 1000)) for _ in range(3)])
        third = chance.choice([None, 0, 1, 2])
        found = index.search(queries, 10, filter=None if third is None else {"third": third})
        assert found.vectors is not None and found.texts is not None and found.metadata is not None
        for row, place in found.mask.nonzero().tolist():
            hits += 1
            vector, number = found.vectors[row, place], found.metadata[row][place]["number"]
            same = found.texts[row][place] == str(number) and torch.equal(vector, vector_of(number)[0])
            true = score(queries[row][None], vector[None, None], index.metric)[0, 0]
            wrong += not (same and third in (None, number % 3) and true == found.scores[row, place])
    index.close()
    return hits, wrong


def begin(wait: Callable[[], int]) -> None:
    torch.set_num_threads(1)
    wait()


@pytest.mark.parametrize("store", ["pgvector", "lancedb"])
def test_processes_share_a_store(store: str) -> None:
    """Invariant 92: two write while two search."""
    spawn = multiprocessing.get_context("spawn")
    jobs = [(write, 0), (write, 1), (search, 0), (search, 1)]
    with empty_place(store) as address:
        with ProcessPoolExecutor(len(jobs), spawn, begin, (spawn.Barrier(len(jobs)).wait,)) as pool:
            futures = [pool.submit(job, address, number, min(60.0, 3.0 * TIMES)) for job, number in jobs]
            first, second, *searches = [future.result() for future in futures]
        index = Index.open(address)
        assert {name: index[name].metadata["number"] for name in index.ids} == first | second
        index.close()
    assert all(hits and not wrong for hits, wrong in searches), searches
