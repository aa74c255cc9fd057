"""The cross-attention layers of a diffusers UNet, seen from outside: which there are, their sizes, their queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmattn.adapters.decoupled import DecoupledAdapter, HeadSize
from mmattn.errors import AttachError


def find_places(host: nn.Module) -> tuple[str, ...]:
    """Names of the cross-attention layers of a UNet, in the order of its `attn_processors`.

    Raises:
        AttachError: it has none.
    """
    processors: Any = getattr(host, "attn_processors", None)
    names = [name.removesuffix(".processor") for name in processors] if isinstance(processors, dict) else []
    modules = [(name, host.get_submodule(name)) for name in names]
    found = tuple(name for name, module in modules if reads_text(module))
    if not found:
        raise AttachError(
            f"{type(host).__name__} has no cross-attention layers beside which an adapter could read a memory; a "
            "UNet2DConditionModel with cross-attention blocks has"
        )
    return found


def reads_text(attn: Any) -> bool:
    """Whether this is an `Attention` of diffusers that looks at the text."""
    return bool(getattr(attn, "is_cross_attention", False)) or getattr(attn, "added_kv_proj_dim", None) is not None


def pick_places(adapter: DecoupledAdapter, places: Sequence[str]) -> list[int]:
    """Numbers of the attention layers an adapter asks for.

    Raises:
        AttachError: the host has no block of that name.
    """
    if adapter.blocks is None:
        return list(range(len(places)))
    for prefix in adapter.blocks:
        if not any(place.startswith(prefix) for place in places):
            raise AttachError(f"blocks names {prefix!r}, and no attention layer begins so; there are: {places}")
    return [index for index, place in enumerate(places) if place.startswith(adapter.blocks)]


def text_width(host: nn.Module) -> int:
    """Width of the host's own text."""
    width = getattr(getattr(host, "config", None), "cross_attention_dim", None)
    width = width[-1] if isinstance(width, (list, tuple)) else width
    if not isinstance(width, int):
        raise AttachError(f"the config of {type(host).__name__} has no cross_attention_dim")
    return width


def head_size(attn: Any) -> HeadSize:
    """Heads, key/value heads and head width of an attention layer of diffusers."""
    width = attn.inner_dim // attn.heads
    return HeadSize(attn.heads, attn.inner_kv_dim // width, width)


def query_heads(attn: Any, x: Tensor, temb: Tensor | None) -> Tensor:
    """The queries (b, h, l, k) that an attention layer of diffusers makes of x (b, l, d) or (b, d, height, width)."""
    if attn.spatial_norm is not None:
        x = attn.spatial_norm(x, temb)
    if x.dim() == 4:
        x = x.flatten(2).transpose(1, 2)
    if attn.group_norm is not None:
        x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
    q = attn.to_q(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)
    return q if attn.norm_q is None else attn.norm_q(q)
