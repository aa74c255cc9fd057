"""Exact search: a scan in bfloat16 or float32 proposes every entry that may be among the best, within an error bound.

The scan gives an entry x the score s' with |s' - s| <= slack(x). The k-th largest lower bound is a floor that each of
the k best reaches with its upper bound; all entries that do are candidates, and their scores in float64 decide. With
|q| <= 1 the slack is that of rounding both factors, whose errors are measured, and the product:

    |q'x' - qx| <= |q - q'| |x| + |q'| |x - x'|

Distances are compared as qx - |x|²/2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.retrieval.scoring import lengths_of, wide

#: With fewer numbers, the candidates that bfloat16 leaves cost more than the scan saves.
_WORTHWHILE = 1 << 24
#: Scores computed at once, and rows converted at once.
_SCORES, _ROWS = 1 << 25, 1 << 13


class ExactScan:
    """An immutable search structure over vectors (n, e) that misses none of the best."""

    exact = True

    def __init__(self, vectors: Tensor, metric: str, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or scan_dtype(vectors)
        norms = lengths_of(vectors)
        self.metric = metric
        self.largest = norms.amax().clamp(min=torch.finfo(torch.float32).tiny)
        divisors = norms if metric == "cosine" else self.largest.expand(len(norms))
        self.scan = torch.empty(vectors.shape, dtype=dtype, device=vectors.device)
        errors = torch.empty_like(norms)
        for start in range(0, len(vectors), _ROWS):
            block = slice(start, start + _ROWS)
            scaled = vectors[block].to(norms.dtype) / divisors[block, None]
            self.scan[block] = scaled.to(dtype)
            errors[block] = lengths_of(scaled - self.scan[block])
        self.norms, self.errors = (norms / divisors).float(), errors.float()

    def __len__(self) -> int:
        return len(self.scan)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Return rows (b, c) that contain the `count` best of the allowed rows (n,); -1 fills shorter lines."""
        count = min(count, len(self) if allowed is None else int(allowed.sum()))
        if not count or not len(queries):
            return torch.empty(len(queries), 0, dtype=torch.long, device=self.scan.device)
        blocks = [self._candidates(block, count, allowed) for block in queries.split(max(1, _SCORES // len(self)))]
        return blocks[0] if len(blocks) == 1 else _padded([row for block in blocks for row in block])

    def _candidates(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        scaled, stretch = self._scaled(queries)
        rounded = scaled.to(self.scan.dtype)
        values = (rounded @ self.scan.T).float()
        error = lengths_of(scaled - rounded).float() + error_of_product(self.scan.dtype, self.scan.shape[1])
        least = torch.full_like(stretch, 1e-30)
        if self.metric == "l2":
            values -= self.norms.square() / (2 * stretch[:, None])
            least += 2.0**-21 * stretch  # far queries: float32 rounds the distance, and rounded scores may tie
        if allowed is not None:
            values.masked_fill_(~allowed, -torch.inf)
        top = values.topk(min(len(self), count + 8 if self.scan.dtype == torch.float32 else 4 * count + 32))
        slack = 1.01 * (error * self.norms.amax() + self.errors.amax()) + least
        near = (top.values >= (top.values[:, count - 1] - 2 * slack)[:, None]) & (top.values > -torch.inf)
        rows = top.indices.masked_fill(~near, -1)[:, near.any(0)]
        uncertain = near[:, -1].nonzero()[:, 0].tolist() if top.values.shape[1] < len(self) else []
        if not uncertain:
            return rows
        lines = list(rows)
        for i in uncertain:  # too many are near: bound each entry by its own length and error
            slack = 1.01 * (error[i] * self.norms + self.errors) + least[i]
            floor = (values[i] - slack).topk(count).values[-1]
            lines[i] = ((values[i] + slack >= floor) & (values[i] > -torch.inf)).nonzero()[:, 0]
        return _padded(lines)

    def _scaled(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (b, e) of at most length 1, and the divisor (b,) of those longer than every entry ("l2")."""
        queries = queries.to(wide(queries.device))
        lengths = lengths_of(queries)
        if self.metric == "l2":
            stretch = (lengths / self.largest).clamp(min=1)
            return queries / (self.largest * stretch)[:, None], stretch.float()
        return queries / lengths.masked_fill(lengths == 0, 1)[:, None], torch.ones_like(lengths, dtype=torch.float32)


def scan_dtype(vectors: Tensor) -> torch.dtype:
    """Return bfloat16 where the processor multiplies it faster than float32 and there is enough to scan."""
    quick = vectors.device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.bfloat16 if quick and vectors.numel() >= _WORTHWHILE else torch.float32


def error_of_product(dtype: torch.dtype, width: int) -> float:
    """Return how far a product of two unit vectors of this dtype may be from the exact one."""
    sums = (width + 32) * 2.0**-23
    if dtype == torch.bfloat16:
        return 2.0**-8 + sums
    try:
        coarse = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set through torch's newer switches, one per backend
        coarse = True
    return 2.0**-6 + sums if coarse else sums


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=-1)
