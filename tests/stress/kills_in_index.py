"""Kill a process that saves an index again and again, and look at the folder after each kill.

    python -m tests.stress.kills_in_index [KILLS]

The kill (signal 9) comes 10 to 600 milliseconds after the process began, or after its first save. The folder must then
hold one of its saves, whole: every vector and every entry's metadata tell which. Prints one line and exits with 1 if a
folder is torn or something is left behind.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from mmattn import Index
from mmattn.errors import MmattnError

ROOT = Path(__file__).resolve().parents[2]
ENTRIES, WIDTH = 701, 31
WRITER = f"""
import os, sys, torch
from mmattn import Index
torch.set_num_threads(1)
indexes = [Index.build(torch.ones({ENTRIES}, {WIDTH}), store=store) for store in ("exact", "hnsw")]
# Another object than those that the children save: these would know that somebody saved after them, and refuse.
Index.build(torch.ones({ENTRIES}, {WIDTH}), metadata=[1] * {ENTRIES}).save(sys.argv[1])
for line in sys.stdin:
    version = int(line)
    child = os.fork()
    if not child:
        index = indexes[version // 1000 % 2]
        while True:
            index.update(index.ids, torch.full(({ENTRIES}, {WIDTH}), float(version)), metadata=[version] * {ENTRIES})
            index.save(sys.argv[1])
            version += 1
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
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
    command = [sys.executable, "-W", "ignore", "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writers:
        assert writers.stdin is not None and writers.stdout is not None
        for kill in range(kills):
            writers.stdin.write(f"{1000 * kill + 1}\n")
            writers.stdin.flush()
            child = int(writers.stdout.readline())
            while kill % 2 and version_of(folder) <= 1000 * kill:
                time.sleep(0.001)
            time.sleep(chance.uniform(0.01, 0.6))
            os.kill(child, signal.SIGKILL)
            if int(writers.stdout.readline()) != signal.SIGKILL:
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
