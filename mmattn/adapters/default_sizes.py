"""Sizes that an adapter has where none are asked for, from the width of the host d and that of the memory e."""

from __future__ import annotations

from typing import Any

from mmattn.errors import check_bool

MAX_WIDTH = 512
#: A norm takes two numbers from a vector, its mean and its length. Of a narrow one that is most of what it says.
NARROW = 12


def default_heads(d: int, e: int, num_heads: int | None = None, head_dim: int | None = None) -> tuple[int, int]:
    """Number h and width k of the heads of a cross-attention, whose four matrices hold about 4 d² weights at most.

    That is what an attention of the host itself holds, so that an adapter is small beside it whatever the memory's
    width; at most 8 heads of 64.

    >>> default_heads(768, 768), default_heads(128, 128), default_heads(128, 1280)
    ((8, 64), (8, 16), (1, 16))
    """
    width = min(MAX_WIDTH, d, 2 * d * d // (d + e))
    h = max(1, min(8, width // (head_dim or 16))) if num_heads is None else num_heads
    k = max(8, min(64, width // h // 8 * 8)) if head_dim is None else head_dim
    return h, k


def normalises(asked: bool | None, e: int) -> bool:
    """Return True if vectors of width e go through a norm."""
    return e >= NARROW if asked is None else asked


def settle_norm(config: Any) -> None:
    """Set `memory_norm` of a frozen dataclass by the width of its memory, where it is None."""
    if config.memory_norm is not None:
        check_bool("memory_norm", config.memory_norm)
    object.__setattr__(config, "memory_norm", normalises(config.memory_norm, config.memory_dim))
