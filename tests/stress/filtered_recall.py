"""How many of the best entries a search finds under a filter that leaves 1 %, beside the exact store.

    python -m tests.stress.filtered_recall [--store …] [--entries 100000] [--width 384] [--clusters 1000]

Vectors lie around random centres, as encoded texts do; queries too. Prints recall@10 and milliseconds for each query
with the filter and without, and exits with 1 if recall under the filter is below 0.99.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

from mmattn import Index
from tests.stress.stores_under_test import STORES, empty_place

QUERIES, TOP_K = 100, 10


def around(centres: Tensor, count: int) -> Tensor:
    """Vectors (n, e) around some of the centres."""
    return centres[torch.randint(len(centres), (count,))] + 0.7 * torch.randn(count, centres.shape[1])


def timed(index: Index, queries: Tensor, **filter: dict[str, int]) -> tuple[list[set[object]], float]:
    """What each query finds, one at a time, and milliseconds for each."""
    started = time.perf_counter()
    found = [index.search(query, TOP_K, **filter).ids for query in queries]  # type: ignore[arg-type]
    return [set(ids[0]) for ids in found if ids], 1000 * (time.perf_counter() - started) / len(queries)


def main(stores: tuple[str, ...], entries: int, width: int, clusters: int) -> int:
    torch.manual_seed(0)
    centres = torch.randn(clusters, width)
    vectors, queries = around(centres, entries), around(centres, QUERIES)
    metadata = [{"part": row % 100} for row in range(entries)]
    exact = Index.build(vectors, metadata=metadata)
    filters: list[dict[str, dict[str, int]]] = [{"filter": {"part": 7}}, {}]
    best = [timed(exact, queries, **filter)[0] for filter in filters]
    failed = 0
    for store in stores:
        with empty_place(store) as address:
            started = time.perf_counter()
            index = Index.build(vectors, metadata=metadata, store=None if store == "folder" else address)
            built = time.perf_counter() - started
            says = []
            for expected, filter in zip(best, filters, strict=True):
                timed(index, queries[:5], **filter)
                found, each = timed(index, queries, **filter)
                recall = sum(len(a & b) for a, b in zip(found, expected, strict=True)) / (TOP_K * QUERIES)
                says.append(f"recall@{TOP_K} {recall:.4f}, {each:.1f} ms")
                failed |= bool(filter) and recall < 0.99
            index.close()
        name = "exact" if store == "folder" else store
        print(f"{name}: built in {built:.0f} s; 1 % allowed: {says[0]}; all: {says[1]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=STORES, action="append")
    for name, value in (("entries", 100_000), ("width", 384), ("clusters", 1000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    sys.exit(main(tuple(given.store or STORES), given.entries, given.width, given.clusters))
