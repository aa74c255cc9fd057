"""Keys and values of the entries of a bank, a page for each, and their concatenation for the entries of a request."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmattn.core.cross_attention import CrossAttention
from mmattn.core.key_value_projection import KeyValueProjection
from mmattn.core.kv_cache import KeyValue, pack
from mmattn.core.tracing import may_read
from mmattn.errors import ConfigError
from mmattn.kv_store.page_formats import PageFormat


def projection_of(attention: CrossAttention | KeyValueProjection) -> KeyValueProjection:
    """The module that computes the keys and values of a block."""
    return attention.kv_proj if isinstance(attention, CrossAttention) else attention


def make_pages(projection: KeyValueProjection, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (n, g, m, k) of n entries, without a null slot.

    Args:
        projection: computes them.
        memory: (n, m, e), the entries.

    Raises:
        ConfigError: keys are rotated by their position in the memory, which differs between requests.
    """
    if projection.rotary is not None:
        raise ConfigError(
            "keys and values were to be cached by entry, and this layer rotates keys by their position in the memory, "
            "which differs between requests: give the memory of each request instead"
        )
    keys, values = projection.keys_and_values(projection.cast(memory))
    return keys.contiguous(), values.contiguous()


def gather_pages(
    projection: KeyValueProjection,
    form: PageFormat,
    tables: Mapping[str, Tensor],
    rows: Tensor,
    mask: Tensor,
    scores: Tensor | None = None,
) -> KeyValue:
    """What `projection.project` gives for a memory (b, n·m, e) of n entries a row, from the pages of these entries.

    Args:
        projection: that computed the pages.
        form: of the pages.
        tables: the pages, by the names of their parts.
        rows: (b, n), which of them to read.
        mask: (b, n·m) bool.
        scores: (b, n·m).
    """
    weight = projection.k_proj.weight
    dtype = weight.dtype
    if torch.is_autocast_enabled(weight.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(weight.device.type)
    shown = None if may_read(mask) and bool(mask.all()) else mask
    bias = projection.score_bias(scores, shown)
    lengths = projection.packed_lengths(shown)
    if lengths is not None and bias is not None:
        bias = pack(bias, mask, lengths, first=False)
    real = None if lengths is None else mask
    keys, values = form.gather(tables, rows, real, weight.device, dtype)
    return projection.join(keys, values, shown, bias, lengths)
