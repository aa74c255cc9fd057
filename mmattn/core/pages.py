"""Keys and values kept by entry, a page each, and put together for the entries that a request looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from mmattn.core.attention import may_read
from mmattn.core.kv import KeyValue, pack
from mmattn.core.projection import MemoryHeads
from mmattn.errors import ConfigError


def make_pages(attention: MemoryHeads, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (n, g, m, k) of n entries (n, m, e), a null slot apart.

    Raises:
        ConfigError: keys are rotated by their place in the memory, which is another in every request.
    """
    if attention.rotary is not None:
        raise ConfigError(
            "keys and values were to be kept by entry, and this layer rotates keys by their place in the memory, which "
            "is another in every request: give the memory of each request instead"
        )
    keys, values = attention._slots(attention._cast(memory))
    return keys.contiguous(), values.contiguous()


def gather_pages(
    attention: MemoryHeads, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor, scores: Tensor | None = None
) -> KeyValue:
    """What `attention.project` makes of a memory (b, n·m, e) of n entries a row, from the pages of these entries.

    Args:
        keys, values: (·, g, m, k), the pages. rows: (b, n), which of them. mask, scores: (b, n·m).
    """
    weight = attention.k_proj.weight
    dtype = weight.dtype
    if torch.is_autocast_enabled(weight.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(weight.device.type)
    shown = None if may_read(mask) and bool(mask.all()) else mask
    bias = attention._score_bias(scores, shown, mask.shape)
    lengths = attention._packed_lengths(shown)
    if lengths is not None and bias is not None:
        bias = pack(bias, mask, lengths, first=False)
    real = None if lengths is None else mask
    taken = [side_by_side(table, rows, real).to(weight.device, dtype) for table in (keys, values)]
    return attention._joined(taken[0], taken[1], shown, bias, lengths)


def side_by_side(table: Tensor, rows: Tensor, real: Tensor | None) -> Tensor:
    """Pages (b, n) of a table (·, g, m, k) as (b, g, n·m, k), or only the r `real` slots (b, n·m) as (1, g, r, k)."""
    (b, n), (_, g, m, k) = rows.shape, table.shape
    heads = torch.arange(g, device=table.device)[:, None]
    # One copy, straight into the layout that is read: pages lie in the table head by head.
    if real is None:
        pieces = rows[:, None] * g + heads
        return table.view(-1, m * k).index_select(0, pieces.flatten()).view(b, g, n * m, k)
    row, slot = real.to(table.device).nonzero().unbind(1)
    pieces = (rows[row, slot // m] * g + heads) * m + slot % m
    return table.view(-1, k).index_select(0, pieces.flatten()).view(1, g, len(row), k)
