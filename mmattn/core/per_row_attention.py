"""Attention of rows whose keys and values lie apart: each row attends to its own, and nothing is copied or padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.core.kv_cache import KeyValue


@dataclass(frozen=True)
class KeyValueRows:
    """Keys and values of several rows, computed apart.

    Args:
        rows: of each row, a `KeyValue` of one row.
    """

    rows: tuple[KeyValue, ...]


def attend_rows(
    projection: Any, q: Tensor, memory: KeyValueRows, return_weights: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of each row of queries over its own keys and values.

    Args:
        projection: `KeyValueProjection`, whose keys and values they are.
        q: (b, h, l, k), queries.
        memory: of each row.
        return_weights: also return the weights.

    Returns:
        As `KeyValueProjection.attend`: the output (b, h, l, k), the weights (b, h, l, m) with m of the longest, and
        which queries see anything, (b, 1, 1, 1) bool, None where all do.
    """
    outs, weights, seen = [], [], []
    for own, kv in zip(q.split(1), memory.rows, strict=True):
        out, shown, allowed = projection.attend(own, kv, return_weights=return_weights)
        outs.append(out)
        weights.append(shown)
        seen.append(None if allowed is None else allowed.any(-1, keepdim=True))
    whole = None
    if any(one is not None for one in seen):
        whole = torch.cat([q.new_ones(1, 1, 1, 1, dtype=torch.bool) if one is None else one for one in seen])
    if not return_weights:
        return torch.cat(outs), None, whole
    longest = max(shown.shape[3] for shown in weights)
    return torch.cat(outs), torch.cat([F.pad(shown, (0, longest - shown.shape[3])) for shown in weights]), whole
