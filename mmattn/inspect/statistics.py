"""What kind of looker each head is: sharp or blurred, near the diagonal or far from it, at the memory or at nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmattn.errors import ShapeError


@dataclass(frozen=True, eq=False)
class HeadFigures:
    """Figures (h,) of the heads of one layer, over the queries that look at something.

    Args:
        entropy: of the weights, in bits. null: the share that goes to no slot: what a null slot takes.
        distance: how far the weights lie from the diagonal, from 0 to 1: query i of l and slot j of m stand at
            i / (l - 1) and j / (m - 1). diagonal: the share within half a slot of it.
    """

    entropy: Tensor
    distance: Tensor
    diagonal: Tensor
    null: Tensor

    def __str__(self) -> str:
        lines = ["head  entropy  distance  diagonal    null"]
        figures = torch.stack([self.entropy, self.distance, self.diagonal, self.null], 1).tolist()
        for head, (entropy, distance, diagonal, null) in enumerate(figures):
            lines.append(f"{head:>4}  {entropy:>7.2f}  {distance:>8.2f}  {diagonal:>8.1%}  {null:>6.1%}")
        return "\n".join(lines)


def head_figures(weights: Tensor) -> HeadFigures:
    """Figures of the heads in weights (b, h, l, m), one call of `record`; the steps of a generation: `cat` them over l.

    Queries whose weights are all 0, which saw nothing, are left out.

    Raises:
        ShapeError: not (b, h, l, m).

    >>> print(head_figures(torch.stack([torch.eye(3), torch.full((3, 3), 0.25)])[None]))
    head  entropy  distance  diagonal    null
       0     0.00      0.00   100.0%    0.0%
       1     1.58      0.44    33.3%   25.0%
    """
    if weights.dim() != 4:
        raise ShapeError(f"weights must be (b, h, l, m), got {tuple(weights.shape)}")
    weights = weights.detach().float()
    _, _, l, m = weights.shape
    total = weights.sum(-1)
    seeing = total > 0
    shares = weights / total.clamp_min(1e-12)[..., None]
    at = torch.arange(l, device=weights.device)[:, None] / max(l - 1, 1)
    apart = (torch.arange(m, device=weights.device) / max(m - 1, 1) - at).abs()
    near = apart <= 0.5 / max(m - 1, 1)

    def mean(values: Tensor) -> Tensor:
        return values.where(seeing, 0).sum((0, 2)) / seeing.sum((0, 2)).clamp_min(1)

    return HeadFigures(
        mean(torch.special.entr(shares).sum(-1) / math.log(2)),
        mean((shares * apart).sum(-1)),
        mean((shares * near).sum(-1)),
        mean((1 - total).clamp_min(0)),
    )
