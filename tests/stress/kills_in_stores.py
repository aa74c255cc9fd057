"""Kill a process in the middle of 1,000 writes to a store, open it again, and look for what was acknowledged.

    python -m tests.stress.kills_in_stores [--store folder|pgvector|lancedb] [--kills 5] [--writes 1000]

Another process adds entries one change at a time and prints each id once the change is done; the kill (signal 9) comes
at a random moment between the first and the last. Then every acknowledged entry must be there with its own vector, text
and metadata, at most one more may be, in the order in which they were added, and the next process goes on writing.
"folder" saves an index after each change. Prints one line for each store and exits with 1 if something is lost or torn.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch

from mmattn import Index
from tests.stress.stores_under_test import STORES, WIDTH, empty_place, vector_of

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import os, sys, torch
from mmattn import Index
from tests.stress.stores_under_test import vector_of
torch.set_num_threads(1)
address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
index = Index.open(address)
for number in range(first, first + count):
    index.add(vector_of(number), ids=[f"entry {number}"], texts=[str(number)], metadata=[{"number": number}])
    if os.path.isdir(address):
        index.save(address)
    print(number, flush=True)
"""


def lost_or_torn(index: Index, acknowledged: int) -> str | None:
    """What is wrong with an index after so many acknowledged writes; None where it is whole."""
    if not acknowledged <= len(index) <= acknowledged + 1:
        return f"{acknowledged} writes were acknowledged, and {len(index)} entries are there"
    entries = index.store.get(index.ids)
    for row, name in enumerate(index.ids):
        expected = (f"entry {row}", str(row), {"number": row})
        found = (name, entries.texts[row], entries.metadata[row])
        if found != expected or not torch.equal(entries.vectors[row], vector_of(row)[0]):
            return f"entry {row} is torn: {found}"
    return None


def kills(store: str, count: int, writes: int, seed: int = 0) -> tuple[int, int]:
    """Return acknowledged writes, and whole ones that were not acknowledged, over `count` kills of `writes` writes."""
    chance, done, more = random.Random(seed), 0, 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with empty_place(store) as address:
        if store == "folder":
            Index.build(torch.empty(0, WIDTH)).save(address)
        else:
            Index.build(torch.empty(0, WIDTH), store=address).close()
        for _ in range(count):
            command = [sys.executable, "-W", "ignore", "-c", WRITER, address, str(done), str(writes)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as writer:
                assert writer.stdout is not None
                for _ in range(chance.randrange(1, writes)):
                    if not writer.stdout.readline():
                        raise RuntimeError("the process did not live until it was killed")
                    done += 1
                writer.send_signal(signal.SIGKILL)
                done += len(writer.stdout.read().splitlines())  # acknowledged before the kill came
                if writer.wait() != -signal.SIGKILL:
                    raise RuntimeError("the process did not live until it was killed")
            index = Index.open(address)
            wrong = lost_or_torn(index, done)
            if wrong:
                raise RuntimeError(wrong)
            more += len(index) - done
            done = len(index)
            index.close()
    return done, more


def main(stores: tuple[str, ...], count: int, writes: int) -> int:
    failed = 0
    for store in stores:
        try:
            done, more = kills(store, count, writes)
            print(
                f"{store}: {count} kills, {done} entries: 0 lost, 0 torn, {more} whole ones not acknowledged",
                flush=True,
            )
        except RuntimeError as error:
            failed = 1
            print(f"{store}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=STORES, action="append")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--writes", type=int, default=1000)
    given = parser.parse_args()
    sys.exit(main(tuple(given.store or STORES), given.kills, given.writes))
