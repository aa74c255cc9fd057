"""Scores of a search: their definition, the check of vectors, and the selection of the best candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from mmattn.errors import NonFiniteError, ShapeError

METRICS = ("cosine", "ip", "l2")

#: Products of two vectors of this length still fit into float32.
LARGEST = 1e18
_BLOCK = 1 << 22


def wide(device: torch.device) -> torch.dtype:
    """Return the widest float dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def lengths_of(vectors: Tensor) -> Tensor:
    """Return the Euclidean lengths (b,) of vectors (b, e), in the widest dtype."""
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=wide(vectors.device))


def score(queries: Tensor, vectors: Tensor, metric: str) -> Tensor:
    """Return how well vectors fit queries: (b, c) float32, higher is better, rounded once from float64. Differentiable.

    Args:
        queries: (b, e).
        vectors: (b, c, e) to compare each query with, or (c, e) for all queries.
        metric: "cosine", "ip" (the inner product), or "l2" (the negative squared distance).
    """
    queries, vectors = queries[:, None].to(wide(queries.device)), vectors.to(wide(vectors.device))
    if metric == "l2":
        return -(vectors - queries).square().sum(-1).float()
    if metric == "cosine":
        queries, vectors = directions(queries), directions(vectors)
    products = queries[:, 0] @ vectors.T if vectors.dim() == 2 else (vectors @ queries.transpose(1, 2))[..., 0]
    return products.float()


def directions(vectors: Tensor) -> Tensor:
    """Return vectors (…, e) divided by their length; zeros stay zeros."""
    # The zeros that stand for a missing entry must not become NaN, which would reach the gradients.
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)


def gather(vectors: Tensor, rows: Tensor) -> Tensor:
    """Return the vectors (b, c, e) of rows (b, c); zeros where a row is -1."""
    if not len(vectors):
        return vectors.new_zeros(*rows.shape, vectors.shape[1])
    absent = rows < 0
    gathered = vectors[rows.clamp(min=0)]
    return gathered.masked_fill_(absent[..., None], 0) if bool(absent.any()) else gathered


def best_rows(queries: Tensor, vectors: Tensor, rows: Tensor, metric: str, count: int) -> Tensor:
    """Return the `count` best candidates: rows (b, count), best first; equal scores in the order of the rows.

    Args:
        queries: (b, e).
        vectors: (n, e), which the rows index.
        rows: (b, c) candidates; -1 is none.
        metric: as for `score`.
        count: how many to select; -1 fills missing ones.
    """
    rows = rows.sort(dim=1).values
    best = rows.new_full((len(rows), count), -1)
    step = max(1, _BLOCK // max(1, rows.shape[1] * vectors.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        fit = score(queries[start : start + step], gather(vectors, block), metric)
        order = fit.masked_fill(block < 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :count]
        best[start : start + step, : order.shape[1]] = block.gather(1, order)
    return best


def check_vectors(what: str, vectors: Tensor, metric: str) -> None:
    """Refuse vectors (b, e) that cannot be compared, by the first such row."""
    lengths = lengths_of(vectors.detach())
    wrong = ~(lengths <= LARGEST)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        fault = (
            f"is {float(lengths[row]):.1e} long, and its products do not fit into float32"
            if vectors[row].isfinite().all()
            else "has NaN or infinite values (in float32)"
        )
        raise NonFiniteError(f"{what}: row {row} {fault}; repair it or leave it out. Nothing was changed")
    if metric == "cosine" and (lengths == 0).any():
        row = int((lengths == 0).nonzero()[0])
        raise ShapeError(
            f"{what}: row {row} is all zeros, which has no direction for metric 'cosine'; leave it out, or use 'ip' or "
            "'l2'. Nothing was changed"
        )
