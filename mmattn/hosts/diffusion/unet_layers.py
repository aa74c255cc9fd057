"""The attention layers of a diffusers UNet that read text, and the width of that text."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmattn.errors import AttachError
from mmattn.hosts.diffusion.heads import attention_names


def find_layer_names(host: nn.Module) -> tuple[str, ...]:
    """Names of the cross-attention layers of a UNet, in the order of its `attn_processors`.

    Raises:
        AttachError: it has none, or others than UNets have.
    """
    names = tuple(name for name in attention_names(host) if reads_text(host.get_submodule(name)))
    other = next((attn for attn in map(host.get_submodule, names) if not is_beside_text(attn)), None)
    if other is not None:
        raise AttachError(
            f"no adapter can act beside the attention of {type(host).__name__}: its {type(other).__name__} layers are "
            "not those of UNets, or join text and picture in one softmax; a UNet2DConditionModel has layers that fit"
        )
    if not names:
        raise AttachError(
            f"{type(host).__name__} has no cross-attention layers at which an adapter could attend to a memory; a "
            "UNet2DConditionModel with cross-attention blocks has"
        )
    return names


def reads_text(attn: Any) -> bool:
    """Whether this is an `Attention` of diffusers that attends to the text."""
    return bool(getattr(attn, "is_cross_attention", False)) or getattr(attn, "added_kv_proj_dim", None) is not None


def is_beside_text(attn: Any) -> bool:
    """Whether a layer is an `Attention` of diffusers in which only the picture has queries, and there is one output."""
    known = ("heads", "inner_dim", "inner_kv_dim", "spatial_norm", "group_norm", "norm_q", "rescale_output_factor")
    return all(hasattr(attn, name) for name in known) and getattr(attn, "add_q_proj", None) is None


def text_width(host: nn.Module) -> int:
    """Width e of the text that the host attends to.

    Raises:
        AttachError: its config has none.
    """
    width = getattr(getattr(host, "config", None), "cross_attention_dim", None)
    width = width[-1] if isinstance(width, (list, tuple)) else width
    if not isinstance(width, int):
        raise AttachError(f"the config of {type(host).__name__} has no cross_attention_dim")
    return width
