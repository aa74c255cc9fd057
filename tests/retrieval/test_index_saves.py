"""Saving an index while others save or read, killed, interrupted, on a full disk: old or new, never half."""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import Index
from mmattn.errors import IndexFileError
from mmattn.retrieval import index_files as folders
from tests.retrieval.searching import WIDTH, same, small
from tests.stress.scripts import Children

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
    done, wrong, seen = threading.Event(), [], set()

    def read() -> None:
        last = False
        while not last:
            last = done.is_set()
            try:
                loaded = Index.load(tmp_path / "index")
                versions = {loaded[name].metadata for name in loaded.ids}
                values = {int(loaded[name].vector[0]) - 1 for name in loaded.ids}
                seen.update(versions)
                if len(versions) != 1 or versions != values:
                    wrong.append((versions, values))
            except Exception as error:
                wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 30):
        index.update(index.ids, torch.full((11, WIDTH), version + 1.0), metadata=[version] * 11)
        index.save(tmp_path / "index")
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong and 29 in seen


# ---- crashes


ENTRIES = 701
SAVES = f"""
import torch
from mmattn import Index
torch.set_num_threads(1)
indexes = [Index.build(torch.ones({ENTRIES}, {WIDTH}), store=store) for store in ("exact", "hnsw")]

def work(folder, first):
    version = int(first)
    index = indexes[version // 1000 % 2]
    while True:
        index.update(index.ids, torch.full(({ENTRIES}, {WIDTH}), float(version)), metadata=[version] * {ENTRIES})
        index.save(folder)
        version += 1
"""


def version_of(folder: Path) -> int:
    """Which save a folder holds, whole."""
    index = Index.load(folder)
    (version,) = {index[name].metadata for name in index.ids}
    assert len(index) == ENTRIES
    assert all(torch.equal(index[name].vector, torch.full((WIDTH,), float(version))) for name in index.ids)
    return int(version)


@pytest.mark.slow
def test_kills_during_saves(tmp_path: Path, seeded: int) -> None:
    """Invariant 67: a process that saves is killed 10 to 600 ms after it began, or after its first save."""
    folder, chance = tmp_path / "index", random.Random(seeded)
    Index.build(torch.ones(ENTRIES, WIDTH), metadata=[1] * ENTRIES).save(folder)
    with Children(SAVES) as writers:
        for kill in range(8):

            def wait(child: int, kill: int = kill) -> None:
                while kill % 2 and version_of(folder) <= 1000 * kill:
                    os.kill(child, 0)
                    time.sleep(0.001)
                time.sleep(chance.uniform(0.01, 0.6))

            assert writers.killed(f"{folder} {1000 * kill + 1}", wait)
            version_of(folder)
    Index.build(torch.ones(3, WIDTH)).save(folder)
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 3


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
