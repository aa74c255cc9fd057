"""The encoded tokens of one entry as bytes, for stores that keep each entry in a row of its own."""

from __future__ import annotations

from torch import Tensor


def pack_tokens(tokens: tuple[Tensor, ...] | None, count: int) -> list[bytes | None]:
    """The tokens of each entry as a safetensors file of one tensor, None where there are none.

    Args:
        tokens: (m, e') of each of the entries, or None.
        count: how many entries there are.
    """
    from safetensors.torch import save

    if tokens is None:
        return [None] * count
    return [save({"tokens": part.contiguous()}) for part in tokens]


def unpack_tokens(packed: list[bytes | None]) -> tuple[Tensor, ...] | None:
    """What `pack_tokens` was given.

    Args:
        packed: of each entry; None where it has no tokens.
    """
    from safetensors.torch import load

    parts = [load(part)["tokens"] for part in packed if part is not None]
    return tuple(parts) if parts and len(parts) == len(packed) else None
