"""MaxSim, the score of late interaction: entries and queries of several vectors each (ColBERT, arXiv 2004.12832).

Equation 3, with q_i the vectors of a query and d_j those of an entry:

    score(q, d) = Σ_i max_j sim(q_i, d_j)

Queries and entries are lists of tensors (m, e) of any lengths, so that nothing is padded and no padding counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmattn.retrieval.scoring import directions, lengths_of, wide

#: Numbers that are compared at once: they should stay in the cache of the processor.
_BLOCK = 1 << 19


def maxsim(queries: Sequence[Tensor], entries: Sequence[Tensor], metric: str) -> Tensor:
    """How well entries fit queries: (b, n) float32, higher is better, rounded once from float64. Differentiable.

    Args:
        queries: b tensors (l, e), on one device, at least one row each.
        entries: n tensors (m, e), at least one row each.
        metric: "cosine", or "ip", the inner product.
    """
    lengths = [len(query) for query in queries]
    if not lengths or not entries:
        return torch.zeros(len(queries), len(entries))
    asked = torch.cat(list(queries))
    asked = asked.to(wide(asked.device))
    if metric == "cosine":
        asked = directions(asked)
    scores = []
    for block in _blocks(entries, len(asked) + asked.shape[1]):
        vectors = torch.cat(block).to(asked)
        fit = asked @ vectors.T
        if metric == "cosine":
            fit = fit / lengths_of(vectors)
        best = torch.stack([part.amax(1) for part in fit.split([len(entry) for entry in block], 1)], 1)
        scores.append(torch.stack([part.sum(0) for part in best.split(lengths)]))
    return torch.cat(scores, 1).float()


def best_entries(queries: Sequence[Tensor], entries: Sequence[Tensor], rows: Tensor, metric: str, count: int) -> Tensor:
    """The `count` best of the candidates: rows (b, count), best first; equal scores in the order of the rows.

    Args:
        queries: b tensors (l, e).
        entries: n tensors (m, e), which the rows count.
        rows: (b, c) candidates; -1 is none.
        metric: how they are compared.
        count: how many to select; -1 fills what is missing.
    """
    candidates = [sorted(row for row in line if row >= 0) for line in rows.tolist()]
    chosen = rows.new_full((len(rows), count), -1)
    # All entries are candidates of all queries where nothing is left out: then they are read once.
    together = len(candidates) > 1 and all(line == candidates[0] for line in candidates)
    step = len(candidates) if together else 1
    for start in range(0, len(candidates), step):
        line = candidates[start]
        fit = maxsim(queries[start : start + step], [entries[row] for row in line], metric).to(rows.device)
        order = fit.sort(dim=1, descending=True, stable=True).indices[:, :count]
        chosen[start : start + step, : order.shape[1]] = rows.new_tensor(line)[order]
    return chosen


def scores_of(queries: Sequence[Tensor], entries: Sequence[Tensor], rows: Tensor, metric: str) -> Tensor:
    """The scores (b, k) of rows (b, k) of entries, whose -1, none, come last and become -inf."""
    lines = []
    for query, line in zip(queries, rows.tolist(), strict=True):
        found = [entries[row] for row in line if row >= 0]
        scores = maxsim([query], found, metric)[0].to(rows.device)
        lines.append(torch.nn.functional.pad(scores, (0, len(line) - len(found)), value=-torch.inf))
    return torch.stack(lines) if lines else torch.zeros(rows.shape, device=rows.device)


def mean_vectors(parts: Sequence[Tensor], metric: str) -> Tensor:
    """One vector for each tensor (m, e), by which it is a candidate: the mean of its vectors (b, e), float32."""
    means = []
    for part in parts:
        vectors = part.to(wide(part.device))
        mean = (directions(vectors) if metric == "cosine" else vectors).mean(0).float()
        # Vectors that cancel each other have no direction: one of them stands for all.
        means.append(mean if metric != "cosine" or bool(mean.any()) else part[0].float())
    return torch.stack(means)


def _blocks(entries: Sequence[Tensor], width: int) -> Iterator[list[Tensor]]:
    """Runs of entries of which one is compared at once."""
    step = max(1, _BLOCK * len(entries) // (sum(map(len, entries)) * width))
    for start in range(0, len(entries), step):
        yield list(entries[start : start + step])
