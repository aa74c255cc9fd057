"""The attention layers of a diffusers UNet: the names of those that read text, their head sizes and their queries."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from mmattn.adapters.protocols import HeadSizes
from mmattn.errors import AttachError


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


def forward_arguments(host: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a host's forward, in their order; of the model that peft has wrapped.

    Raises:
        AttachError: it takes no picture and time step.
    """
    get_base: Any = getattr(host, "get_base_model", None)
    inner = host if get_base is None else get_base()
    names = tuple(inspect.signature(type(inner).forward).parameters)[1:]
    if "timestep" not in names or not {"sample", "hidden_states"} & set(names):
        raise AttachError(
            f"{type(host).__name__} is called with {', '.join(names)}: no picture (sample or hidden_states) and "
            "timestep, which adapters beside cross-attention layers must know"
        )
    return names


def attention_names(host: nn.Module) -> list[str]:
    """Names of all attention layers of a diffusers model, none of anything else."""
    processors: Any = getattr(host, "attn_processors", None)
    return [name.removesuffix(".processor") for name in processors] if isinstance(processors, dict) else []


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


def head_size(attn: Any) -> HeadSizes:
    """Heads, key/value heads and head width of an attention layer of diffusers."""
    width = attn.inner_dim // attn.heads
    return HeadSizes(attn.heads, attn.inner_kv_dim // width, width)


def query_heads(attn: Any, x: Tensor, temb: Tensor | None) -> Tensor:
    """The queries (b, h, l, k) of an attention layer of diffusers.

    Args:
        attn: the layer.
        x: (b, l, d) or (b, d, height, width).
        temb: (b, c), the embedded time step, for layers with a spatial norm.
    """
    if attn.spatial_norm is not None:
        x = attn.spatial_norm(x, temb)
    if x.dim() == 4:
        x = x.flatten(2).transpose(1, 2)
    if attn.group_norm is not None:
        x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
    q = attn.to_q(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)
    return q if attn.norm_q is None else attn.norm_q(q)
