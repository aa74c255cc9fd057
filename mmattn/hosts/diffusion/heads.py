"""The attention layers of a model of diffusers: their names, sizes and queries, and the way from heads to output.

Layers are known by their shape (`to_q` or a fused `to_qkv`, `to_out`, `heads`), not by their class: nearly every
transformer of diffusers has a class of its own. Some have other names for the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.protocols import HeadSizes
from mmattn.errors import AttachError

#: Names of the same thing in different layers: of the picture's, where text has projections of its own.
_QUERIES, _FUSED = ("to_q", "to_query"), ("to_qkv", "img_qkv_proj", "img_attn_qkv")
_KEYS, _VALUES = ("to_k", "to_key"), ("to_v", "to_value")
_NORMS = ("norm_q", "q_norm", "query_norm", "img_attn_q_norm")
_OUTPUTS = ("to_out", "out_layer", "img_attn_proj")


def _named(attn: Any, names: tuple[str, ...]) -> Any:
    """What a layer has under one of these names, None where it has none."""
    return next((found for name in names if (found := getattr(attn, name, None)) is not None), None)


def attention_names(host: nn.Module) -> list[str]:
    """Names of all attention layers of a diffusers model, none of anything else."""
    processors: Any = getattr(host, "attn_processors", None)
    if isinstance(processors, dict):
        return [name.removesuffix(".processor") for name in processors]
    if not type(host).__module__.startswith("diffusers."):
        return []
    return [name for name, module in host.named_modules() if hasattr(module, "processor") and is_attention(module)]


def is_of_diffusers(model: nn.Module) -> bool:
    """Whether it has attention layers as the models of diffusers have, or is one of those."""
    return bool(attention_names(model)) or type(model).__module__.startswith("diffusers.")


def takes_hidden_states(model: nn.Module) -> bool:
    """Whether it is called as transformers of diffusers are: with `hidden_states` and a `timestep`."""
    return {"hidden_states", "timestep"} <= set(_parameters(model))


def _parameters(host: nn.Module) -> tuple[str, ...]:
    get_base: Any = getattr(host, "get_base_model", None)
    inner = host if get_base is None else get_base()
    return tuple(inspect.signature(type(inner).forward).parameters)[1:]


def forward_arguments(host: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a host's forward, in their order; of the model that peft has wrapped.

    Raises:
        AttachError: it takes no picture and time step.
    """
    names = _parameters(host)
    if "timestep" not in names or not {"sample", "hidden_states"} & set(names):
        raise AttachError(
            f"{type(host).__name__} is called with {', '.join(names)}: no picture (sample or hidden_states) and "
            "timestep, which adapters beside cross-attention layers must know"
        )
    return names


#: Arguments of which there is one for all rows.
SHARED = ("img_ids", "txt_ids", "padding_mask", "position_ids", "text_rope_pos", "image_rotary_emb")


def is_attention(attn: Any) -> bool:
    """Whether queries can be read off a layer, and what heads compute be brought to its output."""
    q, heads = queries_of(attn), heads_of(attn)
    if getattr(attn, "use_differential", False):
        return False  # two softmaxes, one taken from the other: there are two queries
    return isinstance(q, nn.Module) and hasattr(q, "weight") and isinstance(heads, int) and heads > 0


def heads_of(attn: Any) -> Any:
    """How many heads an attention layer has."""
    return _named(attn, ("heads", "num_heads"))


def head_size(attn: Any) -> HeadSizes:
    """Heads, key/value heads and head width of an attention layer of diffusers."""
    heads, parts = heads_of(attn), 3 if _named(attn, _QUERIES) is None else 1
    inner = getattr(attn, "inner_dim", None) or queries_of(attn).out_features // parts
    width = inner // heads
    return HeadSizes(heads, (getattr(attn, "inner_kv_dim", None) or inner) // width, width)


def queries_of(attn: Any) -> Any:
    """The layer that projects queries; with LoRA or without."""
    return _named(attn, _QUERIES + _FUSED)


def watched_parts(attn: Any) -> list[nn.Module]:
    """Return projections of an attention layer, one of which runs whenever it does."""
    names = _KEYS + _FUSED if _named(attn, _KEYS) is not None else _QUERIES + _FUSED
    return [part for name in names if isinstance(part := getattr(attn, name, None), nn.Module)]


def keys_and_values_of(attn: Any) -> tuple[Any, Any]:
    """The layers that project keys and values; None where a layer has none of its own for them."""
    return _named(attn, _KEYS), _named(attn, _VALUES)


def query_heads(attn: Any, x: Tensor, temb: Tensor | None = None) -> Tensor:
    """The queries (b, h, l, k) of an attention layer of diffusers, normalised as the host does, without positions.

    Args:
        attn: the layer.
        x: (b, l, d) or (b, d, height, width).
        temb: (b, c), the embedded time step, for layers with a spatial norm.
    """
    if getattr(attn, "spatial_norm", None) is not None:
        x = attn.spatial_norm(x, temb)
    if x.dim() == 4:
        x = x.flatten(2).transpose(1, 2)
    if getattr(attn, "group_norm", None) is not None:
        x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
    q, heads, norm = queries_of(attn)(x), heads_of(attn), _named(attn, _NORMS)
    if _named(attn, _QUERIES) is None:
        q = q[..., : q.shape[-1] // 3]
    if norm is None:
        return q.unflatten(2, (heads, -1)).transpose(1, 2)
    if norm_width(norm) == q.shape[-1]:
        return norm(q).unflatten(2, (heads, -1)).transpose(1, 2)
    return norm(q.unflatten(2, (heads, -1))).transpose(1, 2)


def projections(attn: Any, x: Tensor) -> Tensor:
    """Queries, keys and values (b, 3h, l, k) of x (b, l, d) as an attention layer projects them, before its norms."""
    projected = queries_of(attn)(x)
    if _named(attn, _QUERIES) is not None:
        projected = torch.cat([projected, *(one(x) for one in keys_and_values_of(attn))], 2)
    heads: Tensor = projected.unflatten(2, (3 * heads_of(attn), -1)).transpose(1, 2)
    return heads


def check_projections(attn: Any, name: str, reads_text: bool) -> None:
    """Refuse layers whose keys and values are not the picture's, as many heads of them as of its queries.

    Args:
        attn: the layer.
        name: of the layer.
        reads_text: its keys and values are those of the text.

    Raises:
        AttachError: they are the text's, of fewer heads, or of one projection.
    """
    if _named(attn, _QUERIES) is None and not reads_text:
        return
    wanted, found = queries_of(attn).weight.shape, [getattr(one, "weight", None) for one in keys_and_values_of(attn)]
    if reads_text or any(one is None or one.shape != wanted for one in found):
        shapes = [None if one is None else tuple(one.shape) for one in found]
        raise AttachError(
            f"a JointDecoupledAdapter reads keys and values of the picture, of the queries' size {tuple(wanted)}; "
            f"{name} has those of its {'text' if reads_text else 'picture'}, {shapes}: use a DecoupledAdapter, or "
            "choose layers with blocks="
        )


def norm_width(norm: Any) -> int | None:
    """Width of what a norm is over; None where it does not say."""
    for name in ("normalized_shape", "dim"):
        width = getattr(norm, name, None)
        if isinstance(width, (tuple, list)) and width:
            return int(width[-1])
    weight = _named(norm, ("weight", "gamma"))
    return None if weight is None else int(weight.shape[-1])


def into_output(attn: Any, heads: Tensor, output: Tensor) -> Tensor:
    """What heads (b, l, h · k) add to the output of their attention layer, in its shape: through its own projection.

    Args:
        attn: the layer.
        heads: of the adapters.
        output: (b, l, d) or (b, d, height, width), of the layer.
    """
    projection: Any = _named(attn, _OUTPUTS)
    if projection is None:
        return heads  # the block projects it, with what else it computes
    is_one = isinstance(projection, nn.Linear) or hasattr(projection, "base_layer")
    parts: list[Any] = [projection] if is_one else list(projection)
    out = _without_bias(parts[0], heads)
    for part in parts[1:]:
        out = part(out)
    if output.dim() == 4:
        out = out.transpose(1, 2).reshape(output.shape)
    rescaled: Tensor = out / getattr(attn, "rescale_output_factor", 1.0)
    return rescaled


def _without_bias(projection: Any, heads: Tensor) -> Tensor:
    if type(projection) is nn.Linear and not projection.weight.is_meta:
        return F.linear(heads, projection.weight)
    # LoRA may add biases of its own, and offloaded weights have values only inside the layer's forward.
    out: Tensor = projection(heads) - projection(torch.zeros_like(heads[:1, :1]))
    return out
