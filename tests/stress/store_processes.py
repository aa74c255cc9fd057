"""Two processes write to a store while four search it: every hit must be an entry as it was written.

    python -m tests.stress.store_processes [--store pgvector|lancedb] [--seconds 60]

The writers add, update and delete their own entries; text, metadata and vector of each say the same number, in which
the writer and its change stand. The searchers ask with filters and without: a hit whose parts say different numbers,
whose score is not that of its vector, or that the filter does not allow, is wrong. So is an acknowledged entry that is
missing at the end. Exits with 1 if anything
is wrong.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mmattn import Index
from mmattn.retrieval import score
from tests.stress.stores_under_test import STORES, WIDTH, empty_place, vector_of

ROOT = Path(__file__).resolve().parents[2]
LIVING = 97


def write(index: Index, writer: int, until: float) -> tuple[int, list[tuple[str, int]]]:
    """How many changes were made, and the entries that must be left, with their numbers."""
    chance, living, step = random.Random(writer), dict[str, int](), 0
    while time.time() < until:
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
    return step, list(living.items())


def search(index: Index, seed: int, until: float) -> tuple[int, int, int]:
    """How many searches, hits and wrong hits there were."""
    chance, searches, hits, wrong = random.Random(seed), 0, 0, 0
    while time.time() < until:
        queries = torch.cat([vector_of(-chance.randrange(1, 1000)) for _ in range(3)])
        third = chance.choice([None, 0, 1, 2])
        found = index.search(queries, 10, filter=None if third is None else {"third": third})
        searches += 1
        assert found.vectors is not None and found.texts is not None and found.metadata is not None
        for row, query in enumerate(queries):
            for place in range(int(found.mask[row].sum())):
                hits += 1
                vector, metadata = found.vectors[row, place], found.metadata[row][place]
                number = metadata["number"]
                same = found.texts[row][place] == str(number) and torch.equal(vector, vector_of(number)[0])
                true = score(query[None], vector[None, None], index.metric)[0, 0]
                allowed = third is None or metadata["third"] == third
                wrong += not (same and allowed and true == found.scores[row, place])
    return searches, hits, wrong


def _as_child(role: str, address: str, number: int, until: float) -> None:
    torch.set_num_threads(1)
    index = Index.open(address)
    print("ready", flush=True)
    sys.stdin.readline()
    until += time.time()
    print(repr(write(index, number, until) if role == "write" else search(index, number, until)), flush=True)
    index.close()


def _in_processes(address: str, seconds: float) -> Iterator[tuple[str, object]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.stress.store_processes"]
    jobs = [("write", 0), ("write", 1), *(("search", number) for number in range(4))]
    children = [
        subprocess.Popen(
            [*command, "--child", role, address, str(number), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for role, number in jobs
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for (role, _), child in zip(jobs, children, strict=True):
        said, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"a process that was to {role} ended with {child.returncode}")
        yield role, eval(said, {})  # what _as_child printed


def run(store: str, seconds: float) -> tuple[str, int]:
    """What happened, in a line, and how much of it was wrong."""
    with empty_place(store) as address:
        Index.build(torch.empty(0, WIDTH), store=address).close()
        results = list(_in_processes(address, seconds))
        writes = [result for role, result in results if role == "write"]
        searches = [result for role, result in results if role == "search"]
        index = Index.open(address)
        left = {name: number for _, living in writes for name, number in living}  # type: ignore[misc, attr-defined]
        missing = set(left) ^ set(index.ids)
        missing |= {name for name in left if name in index and index[name].metadata["number"] != left[name]}
        index.close()
    changes = sum(count for count, _ in writes)  # type: ignore[misc, attr-defined]
    asked, hits, wrong = (sum(column) for column in zip(*searches, strict=True))  # type: ignore[call-overload]
    line = f"{store}: {changes} changes, {asked} searches, {hits} hits: {wrong} wrong, {len(missing)} lost"
    return line, wrong + len(missing) + (not asked or not hits)


def main(stores: tuple[str, ...], seconds: float) -> int:
    failed = 0
    for store in stores:
        line, wrong = run(store, seconds)
        failed |= bool(wrong)
        print(line, flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _as_child(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=STORES[1:], action="append")
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    sys.exit(main(tuple(given.store or STORES[1:]), given.seconds))
