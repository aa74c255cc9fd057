"""Exact search: a scan in float32 proposes every entry that may be among the best, within an error bound.

The scan gives an entry the score s' with |s' - s| <= slack. Every entry whose s' is at most two slacks below the k-th
largest is a candidate, and their scores in float64 decide. Queries and entries are scaled to at most length 1, and
distances are compared as qx - |x|²/2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.retrieval.scoring import lengths_of, wide

#: Scores computed at once.
_SCORES = 1 << 25


class ExactScan:
    """An immutable search structure over vectors (n, e) that misses none of the best."""

    exact = True

    def __init__(self, vectors: Tensor, metric: str) -> None:
        norms = lengths_of(vectors)
        self.metric = metric
        self.largest = norms.amax().clamp(min=torch.finfo(torch.float32).tiny)
        divisors = norms if metric == "cosine" else self.largest.expand(len(norms))
        parts = zip(vectors.split(1 << 13), divisors.split(1 << 13), strict=True)
        self.scan = torch.cat([(block.to(norms.dtype) / divisor[:, None]).float() for block, divisor in parts])
        self.squares = (norms / self.largest).square().float()

    def __len__(self) -> int:
        return len(self.scan)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Return rows (b, c) that contain the `count` best of the allowed rows (n,); -1 fills shorter lines."""
        count = min(count, len(self) if allowed is None else int(allowed.sum()))
        if not count or not len(queries):
            return torch.empty(len(queries), 0, dtype=torch.long, device=self.scan.device)
        lines: list[Tensor] = []
        for block in queries.split(max(1, _SCORES // len(self))):
            values, slack = self._scores(block)
            if allowed is not None:
                values.masked_fill_(~allowed, -torch.inf)
            top = values.topk(min(len(self), 2 * count + 8))
            floor = top.values[:, count - 1] - 2 * slack
            near = (top.values >= floor[:, None]) & (top.values > -torch.inf)
            for line, row in enumerate(top.indices):
                if near[line, -1] and len(row) < len(self):
                    # More are as near as the last one.
                    row = ((values[line] >= floor[line]) & (values[line] > -torch.inf)).nonzero()[:, 0]
                    lines.append(row)
                else:
                    lines.append(row[near[line]])
        return pad_sequence(lines, batch_first=True, padding_value=-1)

    def _scores(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (b, n) of scaled queries and vectors, and how far from exact they may be (b,)."""
        queries = queries.to(wide(queries.device))
        lengths = lengths_of(queries)
        error = _error_of_product(self.scan.shape[1])
        if self.metric != "l2":
            values = (queries / lengths.masked_fill(lengths == 0, 1)[:, None]).float() @ self.scan.T
            return values, torch.full_like(values[:, 0], error)
        # Queries that are longer than every entry are divided by their own length, and so are the squares.
        stretch = (lengths / self.largest).clamp(min=1)
        values = (queries / (self.largest * stretch)[:, None]).float() @ self.scan.T
        values -= self.squares / (2 * stretch.float()[:, None])
        # Far queries: float32 rounds the distance, and rounded scores may tie.
        return values, error + 2.0**-21 * stretch.float()


def _error_of_product(width: int) -> float:
    """Return how far a float32 product of two vectors of at most length 1 may be from the exact one."""
    rounding = (width + 32) * 2.0**-23 + 1e-30
    try:
        coarse = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set through torch's newer switches, one per backend
        coarse = True
    return 2.0**-6 + rounding if coarse else rounding
