"""Top-10 search by inner product over vectors of width 384, against faiss, torch and numpy.

    python -m recipes.benchmarks search [--quick]

Vectors lie around as many centres as there are thousands of them, and queries near some of the vectors. "mmattn" is
`Index.search` as a user calls it, ids and hits included. The others are the bare libraries, which answer with numbers
of rows.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

import mmattn
from recipes.benchmarks.timing import Rows, Tables, interleaved, ratio

WIDTH, TOP = 384, 10
SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (10_000,)
QUERIES = (1, 32, 256)


def make_vectors(count: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit vectors (n, e) around centres, and queries (b, e) near some of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(max(10, count // 1000), WIDTH, generator=generator)
    vectors = torch.empty(count, WIDTH)
    for block in vectors.split(100_000):
        picked = torch.randint(len(centres), (len(block),), generator=generator)
        block.copy_(centres[picked] + 0.7 * torch.randn(len(block), WIDTH, generator=generator))
    vectors = torch.nn.functional.normalize(vectors, dim=-1, out=vectors)
    near = vectors[torch.randint(count, (queries,), generator=generator)]
    near = near + 0.3 * torch.randn(near.shape, generator=generator) / WIDTH**0.5
    return vectors, torch.nn.functional.normalize(near, dim=-1)


@torch.no_grad()
def measure(count: int, seconds: float = 6.0) -> Rows:
    """Return by number of queries the time beside faiss' flat index, queries a second and recall@10."""
    import faiss

    vectors, queries = make_vectors(count, max(QUERIES))
    arrays, rows = vectors.numpy(), Rows()
    flat = faiss.IndexFlatIP(WIDTH)
    flat.add(arrays)
    index = mmattn.Index.build(vectors, metric="ip")
    for number in QUERIES:
        some = queries[:number]
        array = some.numpy()
        best = (some @ vectors.T).topk(TOP).indices

        def by_numpy(array: np.ndarray = array) -> object:
            scores = array @ arrays.T
            near = np.argpartition(scores, -TOP, axis=1)[:, -TOP:]
            order = np.argsort(np.take_along_axis(scores, near, 1), axis=1)[:, ::-1]
            return np.take_along_axis(near, order, 1)

        times = interleaved(
            {
                "faiss": lambda array=array: flat.search(array, TOP),
                "torch": lambda some=some: (some @ vectors.T).topk(TOP),
                "numpy": by_numpy,
                "mmattn": lambda some=some: index.search(some, TOP),
            },
            seconds=seconds,
            most=100,
        )
        row = {name: ratio(times, name, "faiss") for name in times if name != "faiss"}
        row["queries a second"] = number / statistics.median(times["mmattn"]) * 1e3
        ids: Any = index.search(some, TOP).ids
        row["recall@10"] = statistics.fmean(
            len(set(hits) & set(right)) / TOP for hits, right in zip(ids, best.tolist(), strict=True)
        )
        rows[f"{count:,} entries, {number} {'queries' if number > 1 else 'query'}"] = row
    return rows


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield exact top-10 search for each unit of faiss' flat index."""
    rows: Rows = {}
    for count in QUICK_SIZES if quick else SIZES:
        rows |= measure(count, 1.0 if quick else 6.0)
    title = "time of the ten best of so many entries of width 384, for each unit of faiss IndexFlatIP"
    yield f"Search: {title}", "index", rows
