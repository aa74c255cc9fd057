"""Saving an index while others save or read, killed, interrupted, on a full disk: old or new, never half."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import Index
from mmattn.errors import IndexFileError
from mmattn.retrieval import index_files as folders
from tests.retrieval.searching import WIDTH, same, small

ROOT = Path(__file__).resolve().parent.parent.parent


# ---- writers


def test_a_second_writer_is_refused_while_one_saves(tmp_path: Path) -> None:
    index = small(7)
    index.save(tmp_path / "index")
    handle = os.open(tmp_path / "index", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError, match="another writer is saving"):
        index.save(tmp_path / "index")
    same(index, Index.load(tmp_path / "index"))  # readers need not wait
    os.close(handle)
    index.save(tmp_path / "index")


def test_a_writer_who_did_not_see_the_last_save_is_refused(tmp_path: Path) -> None:
    small(7).save(tmp_path / "index")
    one, two = Index.load(tmp_path / "index"), Index.load(tmp_path / "index")
    one.add(torch.ones(1, WIDTH), ids=["mine"])
    one.save(tmp_path / "index")
    two.delete([0])
    with pytest.raises(IndexFileError, match="another writer has saved there"):
        two.save(tmp_path / "index")
    same(one, Index.load(tmp_path / "index"))
    two.save(tmp_path / "elsewhere")
    one.save(tmp_path / "index")
    new = small(3)
    new.save(tmp_path / "index")  # an index made anew replaces what was there
    same(new, Index.load(tmp_path / "index"))


def test_readers_during_saves_see_committed_versions(tmp_path: Path) -> None:
    """Invariant 81: a version is removed by the second save after it, if nobody reads it; a reader never sees half."""
    index = Index.build(torch.ones(11, WIDTH), metadata=[0] * 11)
    index.save(tmp_path / "index")
    done, seen = threading.Event(), set()

    def read() -> None:
        last = False
        while not last:
            last = done.is_set()
            loaded = Index.load(tmp_path / "index")
            (version,) = {loaded[name].metadata for name in loaded.ids}
            assert {int(loaded[name].vector[0]) - 1 for name in loaded.ids} == {version}
            seen.add(version)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for version in range(1, 30):
            index.update(index.ids, torch.full((11, WIDTH), version + 1.0), metadata=[version] * 11)
            index.save(tmp_path / "index")
        done.set()
    assert [reader.result() for reader in readers] == [None, None] and 29 in seen


@pytest.mark.parametrize("store", ["exact", "hnsw"])
def test_searchers_beside_a_writer_see_one_version(store: str) -> None:
    """Invariant 81: in version v all vectors, texts and metadata say v."""
    count = 1031
    index = Index.build(torch.eye(WIDTH)[torch.arange(count) % WIDTH], metadata=[1] * count, metric="ip", store=store)
    seen, done = set(), threading.Event()

    def search() -> None:
        while not done.is_set():
            hits = index.search(torch.eye(WIDTH)[:3], 5)
            assert hits.metadata is not None and hits.vectors is not None
            (version,) = {value for row in hits.metadata for value in row}
            assert (hits.vectors.sum(-1) == version).all() and (hits.scores == version).all()
            seen.add(version)

    with ThreadPoolExecutor(3) as pool:
        searchers = [pool.submit(search) for _ in range(3)]
        version = 1
        while len(seen) < 3 and version < 1000 and not any(one.done() for one in searchers):
            version += 1
            vectors = torch.eye(WIDTH)[torch.arange(count) % WIDTH] * version
            index.update(index.ids, vectors, metadata=[version] * count)
        done.set()
    assert [one.result() for one in searchers] == [None] * 3 and len(seen) >= 3


def test_writers_in_threads_lose_nothing() -> None:
    index = Index.build(torch.empty(0, WIDTH))

    def write(name: int) -> None:
        for step in range(20):
            index.add(torch.ones(3, WIDTH), metadata=[name] * 3, ids=[f"{name} {step} {i}" for i in range(3)])
            index.delete(index.add(torch.ones(2, WIDTH))[:1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(index) == 4 * 20 * 4 and sum(isinstance(name, int) for name in index.ids) == 80


# ---- crashes


KILLS = """
import os, random, signal, sys, time, torch
from mmattn import Index
torch.set_num_threads(1)
folder, count, dim = sys.argv[1], 701, 12
indexes = [Index.build(torch.ones(count, dim), store=store) for store in ("exact", "hnsw")]

def save(version):
    index = indexes[version // 1000 % 2]
    index.update(index.ids, torch.full((count, dim), float(version)), metadata=[version] * count)
    index.save(folder)

def version_of_whole():
    index = Index.load(folder)
    (version,) = {index[name].metadata for name in index.ids}
    assert len(index) == count
    assert all(torch.equal(index[name].vector, torch.full((dim,), float(version))) for name in index.ids)
    return version

Index.build(torch.ones(count, dim), metadata=[1] * count).save(folder)
for kill in range(8):
    child = os.fork()
    if not child:
        version = 1000 * kill + 1
        while True:
            save(version)
            version += 1
    while kill % 2 and version_of_whole() <= 1000 * kill:
        time.sleep(0.001)
    time.sleep(random.Random(kill).uniform(0.01, 0.6))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    version_of_whole()
"""


@pytest.mark.slow
def test_kills_during_saves(tmp_path: Path) -> None:
    """Invariant 67: a process that saves is killed 10 to 600 ms after it began, or after its first save."""
    command = [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path / "index")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    Index.build(torch.ones(3, WIDTH)).save(tmp_path / "index")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


STEPS = (
    "os.mkdir",
    "os.replace",
    "os.fsync",
    "mmattn.retrieval.index_files.sync_folder",
    "mmattn.retrieval.index_files.file_fingerprint",
)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("step", STEPS)
def test_an_interruption_at_every_step_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    old, new = small(1201, store="hnsw"), small(1300, store="hnsw")
    old.save(tmp_path / "index")
    module, _, name = step.rpartition(".")
    target = os if module == "os" else folders
    original = getattr(target, name)
    outcomes = []
    for place in range(50):
        left = [place]

        def interrupt(*args: Any, left: list[int] = left, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, interrupt)
        try:
            new.save(tmp_path / "index")
            finished = left[0] >= 0
        except error:
            finished = False
        monkeypatch.undo()
        loaded = Index.load(tmp_path / "index")
        assert len(loaded) in (1201, 1300)
        same(old if len(loaded) == 1201 else new, loaded)
        outcomes.append(len(loaded))
        assert len([name for name in os.listdir(tmp_path / "index") if name.startswith("v")]) <= 2
        old._saved.clear()
        new._saved.clear()
        if finished:
            break
        old.save(tmp_path / "index")
    assert finished and len(outcomes) > 1 and outcomes[-1] == 1300 and outcomes[0] == 1201
