"""The attention layers of a model of diffusers: their names, sizes and queries, and the way from heads to output.

Layers are known by their shape (`to_q` or a fused `to_qkv`, `to_out`, `heads`), not by their class: nearly every
transformer of diffusers has a class of its own. Some have other names for the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.host_models import device_of, dtype_of, is_on_disk
from mmattn.adapters.protocols import HeadSizes
from mmattn.core.projection import is_plain_linear
from mmattn.errors import AttachError
from mmattn.hosts.keywords import keywords_of

#: Names of the same thing in different layers: of the picture's, where text has projections of its own.
_QUERIES, _FUSED = ("to_q", "to_query"), ("to_qkv", "img_qkv_proj", "img_attn_qkv")
_KEYS, _VALUES = ("to_k", "to_key"), ("to_v", "to_value")
_NORMS = ("norm_q", "q_norm", "query_norm", "img_attn_q_norm")
_OUTPUTS = ("to_out", "out_layer", "img_attn_proj")


def _named(attn: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """Return the module of a layer under the first of these names that it has, or None."""
    return next((value for name in names if (value := getattr(attn, name, None)) is not None), None)


def attention_names(host: nn.Module) -> list[str]:
    """Return the names of all attention layers of a model of diffusers."""
    processors = getattr(host, "attn_processors", None)
    if isinstance(processors, dict):
        return [name.removesuffix(".processor") for name in processors]
    if not type(host).__module__.startswith("diffusers."):
        return []
    return [name for name, module in host.named_modules() if hasattr(module, "processor") and is_attention(module)]


def is_of_diffusers(model: nn.Module) -> bool:
    """Return whether a model is of diffusers, or has attention layers like one."""
    return bool(attention_names(model)) or type(model).__module__.startswith("diffusers.")


def takes_hidden_states(model: nn.Module) -> bool:
    """Return whether a model is called with `hidden_states` and a `timestep`."""
    return keywords_of(model) >= {"hidden_states", "timestep"}


def forward_arguments(host: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of a host's forward."""
    names = keywords_of(host)
    if "timestep" not in names or not {"sample", "hidden_states"} & names:
        raise AttachError(
            f"{type(host).__name__} is called with {', '.join(sorted(names))}: no picture (sample or hidden_states) "
            "and timestep, which adapters beside cross-attention layers must know"
        )
    return names


#: Arguments of which there is one for all rows.
SHARED = ("img_ids", "txt_ids", "padding_mask", "position_ids", "text_rope_pos", "image_rotary_emb")


def stack_rows(name: str, values: Sequence[Any]) -> Any:
    """Return an argument of a host in several calls as that of one call with all their rows."""
    value = values[-1]
    if isinstance(value, Mapping):
        return {key: stack_rows(key, [each[key] for each in values]) for key in value}
    if isinstance(value, list) and value and isinstance(value[0], Tensor):  # for each layer
        return [stack_rows(name, each) for each in zip(*values, strict=True)]
    if isinstance(value, list):
        return [row for each in values for row in each]
    if not isinstance(value, Tensor) or not value.dim() or name in SHARED:
        return value
    return torch.cat([*values])


def is_attention(attn: nn.Module) -> bool:
    """Return whether a layer has a projection of queries and heads."""
    if getattr(attn, "use_differential", False):
        return False  # the difference of two softmaxes
    q = _named(attn, _QUERIES + _FUSED)
    return isinstance(q, nn.Module) and hasattr(q, "weight") and heads_of(attn) > 0


def heads_of(attn: nn.Module) -> int:
    """Return the number of heads of an attention layer; 0 of another module."""
    heads = getattr(attn, "heads", None) or getattr(attn, "num_heads", None)
    return heads if isinstance(heads, int) else 0


def head_size(attn: nn.Module) -> HeadSizes:
    """Return heads, key/value heads and head width of an attention layer."""
    heads, parts = heads_of(attn), 3 if _named(attn, _QUERIES) is None else 1
    inner = getattr(attn, "inner_dim", None) or getattr(queries_of(attn), "out_features", 0) // parts
    width = inner // heads
    return HeadSizes(heads, (getattr(attn, "inner_kv_dim", None) or inner) // width, width)


def queries_of(attn: nn.Module) -> nn.Module:
    """Return the projection of queries."""
    queries = _named(attn, _QUERIES + _FUSED)
    assert queries is not None, "`is_attention` has found it"
    return queries


def query_projections(attn: nn.Module) -> list[nn.Module]:
    """Return the projections of an attention layer that compute queries; one of them runs whenever the layer does."""
    return [part for name in _QUERIES + _FUSED if isinstance(part := getattr(attn, name, None), nn.Module)]


def weight_of(projection: nn.Module, host: nn.Module) -> Tensor:
    """Return the weight (d_out, d) of a linear layer of a host, without a LoRA on it."""
    projection = getattr(projection, "base_layer", projection)
    if is_plain_linear(projection):
        if is_on_disk(host):
            raise AttachError(
                "start='host' copies projections, and those of this host are on the disk: attach before "
                "apply_group_offloading, or give start='nothing'"
            )
        return projection.weight
    unit = torch.eye(size_of(projection)[1], device=device_of(projection), dtype=dtype_of(host))
    return cast(Tensor, projection(unit) - projection(torch.zeros_like(unit))).T


def size_of(projection: nn.Module) -> tuple[int, int]:
    """Return the size (d_out, d) of the weight of a linear layer, which has another shape in 4 bits."""
    return cast(int, projection.out_features), cast(int, projection.in_features)


def keys_and_values_of(attn: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the projections of keys and of values, None where a layer has none of its own."""
    return _named(attn, _KEYS), _named(attn, _VALUES)


def query_heads(
    attn: nn.Module, x: Tensor, temb: Tensor | None = None, projected: tuple[nn.Module, Tensor] | None = None
) -> Tensor:
    """Return the queries (b, h, l, k) of an attention layer, normalised as in the host, without positions.

    Args:
        attn: the layer.
        x: its inputs (b, l, d) or (b, d, height, width).
        temb: its embedded timestep.
        projected: what the layer itself has projected of its inputs, and by which module.
    """
    part, q = projected or (None, x)
    if part is not queries_of(attn) or q.shape[:-1] != (x.shape[0], x.shape[1] if x.dim() == 3 else x[0, 0].numel()):
        q = _projected_queries(attn, x, temb)
    if _named(attn, _QUERIES) is None:
        q = q[..., : q.shape[-1] // 3]
    return split_heads(q, heads_of(attn), _named(attn, _NORMS))


def _projected_queries(attn: nn.Module, x: Tensor, temb: Tensor | None) -> Tensor:
    """Return the projection (b, l, h · k) of queries, or that of queries, keys and values."""
    spatial_norm, group_norm = getattr(attn, "spatial_norm", None), getattr(attn, "group_norm", None)
    if spatial_norm is not None:
        x = spatial_norm(x, temb)
    if x.dim() == 4:
        x = x.flatten(2).transpose(1, 2)
    if group_norm is not None:
        x = group_norm(x.transpose(1, 2)).transpose(1, 2)
    projected: Tensor = queries_of(attn)(x)
    return projected


def split_heads(x: Tensor, heads: int, norm: nn.Module | None) -> Tensor:
    """Return x (b, l, h · k) by head (b, h, l, k), normalised as a whole or by head, as wide as the norm is."""
    if norm is not None and norm_width(norm) == x.shape[-1]:
        x, norm = norm(x), None
    by_head = x.unflatten(2, (heads, -1))
    return (by_head if norm is None else norm(by_head)).transpose(1, 2)


def projections(attn: nn.Module, x: Tensor) -> Tensor:
    """Return queries, keys and values (b, 3h, l, k) of x (b, l, d), before the norms of an attention layer."""
    projected = queries_of(attn)(x)
    if _named(attn, _QUERIES) is not None:
        projected = torch.cat(
            [projected, *(projection(x) for projection in keys_and_values_of(attn) if projection is not None)], 2
        )
    return projected.unflatten(2, (3 * heads_of(attn), -1)).transpose(1, 2)


def check_projections(attn: nn.Module, name: str, reads_text: bool) -> None:
    """Refuse layers whose keys and values are not those of the picture, with as many heads as its queries."""
    if _named(attn, _QUERIES) is None and not reads_text:
        return
    projections = (queries_of(attn), *keys_and_values_of(attn))
    size, *sizes = (None if one is None else size_of(one) for one in projections)
    if reads_text or sizes != [size, size]:
        raise AttachError(
            f"a JointDecoupledAdapter reads keys and values of the picture of size {size}; {name} has those of its "
            f"{'text' if reads_text else 'picture'}, {sizes}: use a DecoupledAdapter, or choose layers with blocks="
        )


def norm_width(norm: nn.Module) -> int | None:
    """Return the width of a norm, or None."""
    width = getattr(norm, "normalized_shape", None) or getattr(norm, "dim", None)
    if isinstance(width, (tuple, list)) and width:
        return int(width[-1])
    weights = (getattr(norm, name, None) for name in ("weight", "gamma"))
    return next((weight.shape[-1] for weight in weights if isinstance(weight, Tensor)), None)


def into_output(attn: nn.Module, heads: Tensor, factor: float, output: Tensor) -> tuple[Tensor, float]:
    """Project heads (b, l, h · k) to the output of their attention layer, in its shape; return it and its factor."""
    projection = _named(attn, _OUTPUTS)
    if projection is None:
        return heads, factor  # the block projects them
    first, *others = projection if isinstance(projection, (nn.ModuleList, nn.Sequential)) else (projection,)
    if is_plain_linear(first):
        out = F.linear(heads, first.weight)
    else:
        out = first(heads) - cast(Tensor, bias_of(first, heads))
    for part in others:
        out = part(out)
    if output.dim() == 4:
        out = out.transpose(1, 2).reshape(output.shape)
    return out, factor / getattr(attn, "rescale_output_factor", 1.0)


def bias_of(projection: nn.Module, x: Tensor) -> Tensor | None:
    """Return the bias of a projection of x (b, l, d), (d_out,) or (1, 1, d_out), or None."""
    if is_plain_linear(projection):
        return projection.bias
    return cast(Tensor, projection(torch.zeros_like(x[:1, :1])))  # LoRA may add a bias of its own
