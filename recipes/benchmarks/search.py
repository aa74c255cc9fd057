"""Top-10 search by inner product over vectors of width 384, against faiss, torch and numpy.

    python -m recipes.benchmarks search [--quick]

Vectors lie around as many centres as there are thousands of them, and queries near some of the vectors. "exact" is
`Index.search` as a user calls it, ids and hits included; "hnsw", "ivf" and "ivfpq" are faiss under the same
verb. The others are the bare libraries, which answer with numbers of rows. hnsw stops at a hundred thousand
entries, where building it takes minutes.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

import mmattn
from mmattn.evaluation import retrieval_scores
from recipes.benchmarks.timing import Rows, Tables, interleaved, ratio

WIDTH, TOP = 384, 10
SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (10_000,)
QUERIES = (1, 32, 256)
LARGEST_GRAPH = 100_000


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
def measure(count: int, seconds: float = 6.0) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return time beside faiss' flat index, queries a second and recall@10 by number of queries; bytes an entry."""
    import faiss

    vectors, queries = make_vectors(count, max(QUERIES))
    arrays, rows = vectors.numpy(), {}
    flat = faiss.IndexFlatIP(WIDTH)
    flat.add(arrays)
    indexes = {}
    for store in ("exact", "ivf", "ivfpq", *(("hnsw",) if count <= LARGEST_GRAPH else ())):
        indexes[store] = mmattn.Index.build(vectors, metric="ip", store=store)
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
                **{
                    f"mmattn {name}": lambda index=index, some=some: index.search(some, TOP)
                    for name, index in indexes.items()
                },
            },
            seconds=seconds,
            most=100,
        )
        row = {name: ratio(times, name, "faiss") for name in times if name != "faiss"}
        row["mmattn exact, queries a second"] = number / statistics.median(times["mmattn exact"]) * 1e3
        for name, index in indexes.items():
            row[f"{name} recall@10"] = retrieval_scores(index.search(some, TOP), best.tolist(), ["R@10"])["R@10"]
        rows[f"{count:,} entries, {number} {'queries' if number > 1 else 'query'}"] = row
    held = {f"mmattn {name}": bytes_held(index) / count for name, index in indexes.items()}
    return rows, {"faiss": faiss.serialize_index(flat).nbytes / count, **held}


def bytes_held(index: mmattn.Index) -> int:
    """Return the bytes of the vectors, which every index keeps for exact scores, and of its search structures."""
    import faiss

    store: Any = index.store
    held = 0
    for version in (store.version, *index.search_structures.versions()):
        structure = version.parts[0].structure
        if hasattr(structure, "index"):  # one of faiss
            size = faiss.serialize_index(structure.index).nbytes
        else:
            size = sum(value.nbytes for value in vars(structure).values() if isinstance(value, torch.Tensor))
        held += version.entries.vectors.nbytes + size
    return held


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield top-10 search for each unit of faiss' flat index, and bytes of an entry."""
    rows: Rows = {}
    sizes: Rows = {}
    for count in QUICK_SIZES if quick else SIZES:
        times, sizes[f"{count:,} entries"] = measure(count, 1.0 if quick else 6.0)
        rows |= times
    title = "time of the ten best of so many entries of width 384, for each unit of faiss IndexFlatIP"
    yield f"Search: {title}", "index", rows
    yield "Search: bytes held for an entry", "index", sizes
