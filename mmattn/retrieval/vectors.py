"""Vectors on their way in, checked, and the one definition of how well two of them fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmattn.errors import IndexMismatchError, NonFiniteError, ShapeError
from mmattn.memory import Memory

METRICS = ("cosine", "ip", "l2")

#: Products of two such vectors still fit into float32.
LARGEST = 1e18

_BLOCK = 1 << 22


def as_vectors(what: str, given: Any, *, dim: int | None = None, single: bool = False) -> Tensor:
    """Vectors (b, e) in float32 of a tensor, an array, lists of numbers, or a memory with one slot per row.

    Args:
        what: their name in messages.
        given: what was given.
        dim: the width e they must have; None takes any.
        single: whether one vector (e,) stands for a batch of one.

    Raises:
        ShapeError: no numbers, or not (b, e). IndexMismatchError: another width.
    """
    if isinstance(given, Memory):
        if given.length != 1 or not all(given.lengths):
            raise ShapeError(
                f"{what} must have one real slot per row to be compared, got {given!r}: use an encoder that pools, and "
                "give memories of several slots as tokens=, beside the vectors"
            )
        given = given.tokens[:, 0]
    try:
        vectors = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{what} must be numbers (b, e), got {type(given).__name__}: {error}") from error
    if vectors.dtype == torch.bool or vectors.is_complex():
        raise ShapeError(f"{what} must be real numbers, got {vectors.dtype}")
    if single and vectors.dim() == 1:
        vectors = vectors[None]
    if vectors.dim() != 2:
        hint = "; for one vector give vector[None], for none torch.empty(0, e)" if vectors.dim() == 1 else ""
        raise ShapeError(f"{what} must be (b, e), got {tuple(vectors.shape)}{hint}")
    if dim is not None and vectors.shape[1] != dim:
        raise IndexMismatchError(
            f"{what} have width {vectors.shape[1]} and the index has width {dim}: they come from another encoder, or "
            "were cut; encode them as the entries of the index were encoded"
        )
    return vectors.float()


def check_vectors(what: str, vectors: Tensor, metric: str) -> None:
    """Refuse vectors (b, e) that cannot be compared.

    Raises:
        NonFiniteError: NaN or infinity, or too large for products in float32, naming the first such row.
        ShapeError: a vector of zeros, which has no direction, under the cosine.
    """
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


def wide(device: torch.device) -> torch.dtype:
    """The widest dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def lengths_of(vectors: Tensor) -> Tensor:
    """The Euclidean length (b,) of vectors (b, e), in the widest dtype."""
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=wide(vectors.device))


def score(queries: Tensor, vectors: Tensor, metric: str) -> Tensor:
    """How well vectors (b, c, e) fit queries (b, e): (b, c) float32, higher is better, rounded once from float64.

    "cosine" is the cosine, "ip" the inner product, "l2" the squared distance, negative. Differentiable.
    """
    queries, vectors = queries[:, None].to(wide(queries.device)), vectors.to(wide(vectors.device))
    if metric == "l2":
        return -(vectors - queries).square().sum(-1).float()
    if metric == "cosine":
        queries, vectors = directions(queries), directions(vectors)
    return (vectors @ queries.transpose(1, 2))[..., 0].float()


def directions(vectors: Tensor) -> Tensor:
    """Vectors (…, e) divided by their length; zeros stay zeros."""
    # The zeros that stand for a missing entry must not become NaN, which would reach the gradients.
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)


def gather(vectors: Tensor, rows: Tensor) -> Tensor:
    """Vectors (b, c, e) of rows (b, c); zeros where a row is -1."""
    if not len(vectors):
        return vectors.new_zeros(*rows.shape, vectors.shape[1])
    absent = rows < 0
    gathered = vectors[rows.clamp(min=0)]
    return gathered.masked_fill_(absent[..., None], 0) if bool(absent.any()) else gathered


def best(queries: Tensor, vectors: Tensor, rows: Tensor, metric: str, count: int) -> Tensor:
    """The `count` best of the candidates: rows (b, count), best first; equal scores in the order of the rows.

    Args:
        queries: (b, e).
        vectors: (n, e).
        rows: (b, c) candidates; -1 is none.
        metric: how they are compared.
        count: how many to keep; -1 fills what is missing.
    """
    rows = rows.sort(dim=1).values
    chosen = rows.new_full((len(rows), count), -1)
    step = max(1, _BLOCK // max(1, rows.shape[1] * vectors.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        fit = score(queries[start : start + step], gather(vectors, block), metric)
        order = fit.masked_fill(block < 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :count]
        chosen[start : start + step, : order.shape[1]] = block.gather(1, order)
    return chosen
