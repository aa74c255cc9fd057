"""Kill a process that saves an index again and again, and look at the folder after each kill.

    python -m tests.stress.kills_in_index [KILLS]

The kill (signal 9) comes 10 to 600 milliseconds after the process began, or after its first save. The folder must then
hold one of its saves, whole: every vector and every entry's metadata tell which. Prints one line and exits with 1 if a
folder is torn or something is left behind.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from mmattn import Index
from mmattn.errors import MmattnError
from tests.stress.scripts import Children

ENTRIES, WIDTH = 701, 31
WORK = f"""
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
    """Which save a folder holds."""
    index = Index.load(folder)
    (version,) = {index[name].metadata for name in index.ids}
    same = (torch.equal(index[name].vector, torch.full((WIDTH,), float(version))) for name in index.ids)
    if len(index) != ENTRIES or not all(same):
        raise ValueError(f"the metadata are of save {version}, and the vectors or their number are not")
    return int(version)


def killed_saves(folder: Path, kills: int, seed: int) -> set[int]:
    """Kill a process that saves again and again; after each kill the index is whole."""
    chance, found = random.Random(seed), set()
    Index.build(torch.ones(ENTRIES, WIDTH), metadata=[1] * ENTRIES).save(folder)
    with Children(WORK) as writers:
        for kill in range(kills):

            def wait(child: int, kill: int = kill) -> None:
                while kill % 2 and version_of(folder) <= 1000 * kill:
                    os.kill(child, 0)
                    time.sleep(0.001)
                time.sleep(chance.uniform(0.01, 0.6))

            if not writers.killed(f"{folder} {1000 * kill + 1}", wait):
                raise RuntimeError("the process did not live until it was killed")
            found.add(version_of(folder))
    Index.build(torch.ones(3, WIDTH)).save(folder)
    left = sorted(path.name for path in folder.rglob("*") if path.is_file())
    if len(left) != 3:
        raise RuntimeError(f"what the killed ones left behind is still there: {left}")
    return found


def main(kills: int = 200) -> int:
    with tempfile.TemporaryDirectory() as place:
        try:
            found = killed_saves(Path(place) / "index", kills, seed=0)
        except (MmattnError, ValueError, RuntimeError) as error:
            print(f"torn: {error}")
            return 1
    print(f"{kills} kills: 0 torn, {len(found)} saves found; at the end whole")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
