"""Exact search: a fast scan in few bits, and by a bound on its error all that may be among the best.

The scan gives every entry a score s' with |s' - s| <= slack. The k-th best lower bound s' - slack is a floor that every
one of the true k best reaches with s' + slack; all entries that do are candidates, and their true scores decide. So the
result is that of scoring every entry, whatever the dtype of the scan: few bits mean more candidates, never wrong ones.
With q and x scaled to at most length 1 and rounded to q' and x', by Cauchy and Schwarz

    |q'x' - qx| <= |q - q'| |x| + |q'| |x - x'|

where the lengths of the rounding errors are measured, not assumed; to it come the sum over e terms in float32 and the
rounding of the result. Distances are compared as qx - |x|²/2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.retrieval.scoring import lengths_of, wide

# Below, the true scores of the many candidates that few bits leave cost more than the scan saves.
_WORTHWHILE = 1 << 24
_SCORES = 1 << 25
_ROWS = 1 << 13


def scan_dtype(vectors: Tensor) -> torch.dtype:
    """bfloat16 where the processor multiplies it faster than float32 and there is enough to scan."""
    quick = vectors.device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.bfloat16 if quick and vectors.numel() >= _WORTHWHILE else torch.float32


def _coarse_float32() -> bool:
    """Whether products of float32 matrices may round their factors to bfloat16 or TF32."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set through torch's newer switches, one per backend
        return True


class BoundedScan:
    """A search structure over vectors (n, e) that misses none of the best.

    Immutable, so that threads may search while another builds the next one.

    Args:
        vectors: (n, e) float32, at least one.
        metric: how they are compared.
        dtype: of the scan; by default what is fastest here.
    """

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
        self.norms, self.errors = (norms / divisors).float(), errors.float() * 1.001
        self.worst = (self.norms.amax(), self.errors.amax())
        self.bias = -(self.norms.double() if norms.dtype == torch.float64 else self.norms).square() / 2
        # How far the rounding of the result moves it, as a part of it.
        self.unit = 2.0**-8 if dtype == torch.bfloat16 else 0.0

    def __len__(self) -> int:
        return len(self.scan)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Rows (b, c) among which the `count` best are for certain; -1 fills the shorter ones.

        Args:
            queries: (b, e) float32.
            count: how many of the best are wanted.
            allowed: (n,) bool, True = may be found.
        """
        count = min(count, len(self) if allowed is None else int(allowed.sum()))
        if not count or not len(queries):
            return torch.empty(len(queries), 0, dtype=torch.long, device=self.scan.device)
        blocks = [self._candidates(block, count, allowed) for block in queries.split(max(1, _SCORES // len(self)))]
        return blocks[0] if len(blocks) == 1 else _padded([row for block in blocks for row in block])

    def _candidates(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        scaled, stretch = self._scaled(queries)
        rounded = scaled.to(self.scan.dtype)
        loss = lengths_of(scaled - rounded).float() * 1.001
        values = self._scores(rounded, stretch)
        if allowed is not None:
            values.masked_fill_(~allowed, -torch.inf)
        top = values.topk(min(len(self), count + 8 if self.scan.dtype == torch.float32 else 4 * count + 32))
        slack = self._slack(loss, stretch, *self.worst)[:, None]
        floor = self._bound(top.values[:, count - 1 : count], slack, -1)
        near = (self._bound(top.values, slack, 1) >= floor) & (top.values > -torch.inf)
        rows = top.indices.masked_fill(~near, -1)[:, near.any(0)]
        uncertain = near[:, -1].nonzero()[:, 0].tolist() if top.values.shape[1] < len(self) else []
        if not uncertain:
            return rows
        found = list(rows)
        for i in uncertain:
            # Too many are near: bound each of them by its own length and error, and take all that reach the floor.
            own = (values[i] > -torch.inf).nonzero()[:, 0]
            slack = self._slack(loss[i], stretch[i], self.norms[own], self.errors[own])
            lowest = self._bound(values[i, own], slack, -1).topk(count).values[-1]
            found[i] = own[self._bound(values[i, own], slack, 1) >= lowest]
        return _padded(found)

    def _scaled(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (b, e) of at most length 1, and by what (b,) those longer than every entry were divided."""
        queries = queries.to(wide(queries.device))
        lengths = lengths_of(queries)
        if self.metric == "l2":
            stretch = (lengths / self.largest).clamp(min=1)
            return queries / (self.largest * stretch)[:, None], stretch.float()
        return queries / lengths.masked_fill(lengths == 0, 1)[:, None], torch.ones_like(lengths, dtype=torch.float32)

    def _scores(self, rounded: Tensor, stretch: Tensor) -> Tensor:
        values = (rounded @ self.scan.T).float()
        return values if self.metric != "l2" else (values + self.bias / stretch[:, None]).float()

    def _slack(self, loss: Tensor, stretch: Tensor, norms: Tensor, errors: Tensor) -> Tensor:
        """How far a score of the scan may be from the true one, leaving out what `unit` says."""
        sums = (self.scan.shape[1] + 16) * 2.0**-24
        if self.scan.dtype == torch.float32 and _coarse_float32():
            sums += 2.0**-6
        slack = (loss + 1.02 * sums) * norms + 1.02 * errors + 1e-30
        return slack + 2.0**-21 * stretch + 1.02 * self.unit * norms if self.metric == "l2" else slack

    def _bound(self, values: Tensor, slack: Tensor, sign: int) -> Tensor:
        if self.metric == "l2":  # here the score is more than the product whose rounding `unit` bounds
            return values + sign * slack
        return values + sign * (self.unit * values.abs() + slack)


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=-1)
