"""Published gated cross-attention, read into the settings and names of `GatedAdapter`.

Idefics (arXiv 2306.16527; transformers' `IdeficsGatedCrossAttentionLayer`), Mllama, which is Llama 3.2 Vision (arXiv
2407.21783, section 7; `MllamaCrossAttentionDecoderLayer`), and OpenFlamingo (arXiv 2308.01390;
`GatedCrossAttentionBlock`) all have

    y = x + tanh(α) · attend(norm(x), M)
    z = y + tanh(β) · feed_forward(norm(y))

before decoder layers, on a memory that is not normalised. They differ in norms, feed-forward, heads and names.

Tokens for which every slot is masked: the attention of Idefics and OpenFlamingo gives them 0, and their feed-forward
acts (`feed_forward_all`), which is reproduced exactly. In Mllama they attend to all slots uniformly, and so they do in
OpenFlamingo where text attends to all previous images; here the adapter adds nothing to them, so that no token before
an image depends on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.gated.block import GatedLayers
from mmattn.adapters.gated.config import GatedAdapter, GatedLayout
from mmattn.adapters.host_models import depth_of, text_config, width_of
from mmattn.adapters.protocols import Site
from mmattn.errors import AdapterFileError, check_choice, check_int
from mmattn.models.loading import refuse_keys
from mmattn.storage.safetensors import check_values

#: Settings of `GatedAdapter` or `GatedLayout`, by name.
Settings = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """Tensor names and layout of the blocks of a family of published models."""

    # matches the name of a tensor of a decoder layer or block; groups: prefix, number, name within the block
    block: re.Pattern[str]
    marker: str  # prefix of a name that every block has and no other layer
    # from a tensor of a block to the names it has here; several are stacked along its rows
    names: Mapping[str, tuple[str, ...]]
    layout: Settings  # fields of `GatedLayout` that all blocks of the family share
    # as `names`, for the norms of queries and keys of models that have them
    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_dim: int | None = None  # k where neither the weights nor the host determine it


_LLAMA = {
    "input_layernorm.weight": ("norm.weight",),
    "cross_attn.q_proj.weight": ("attention.q_proj.weight",),
    "cross_attn.k_proj.weight": ("attention.kv_proj.k_proj.weight",),
    "cross_attn.v_proj.weight": ("attention.kv_proj.v_proj.weight",),
    "cross_attn.o_proj.weight": ("attention.out_proj.weight",),
    "post_attention_layernorm.weight": ("feed_forward.norm.weight",),
    "mlp.gate_proj.weight": ("feed_forward.swish.weight",),
    "mlp.up_proj.weight": ("feed_forward.up.weight",),
    "mlp.down_proj.weight": ("feed_forward.down.weight",),
}
FAMILIES = {
    "idefics": Family(
        re.compile(r"(.*\.|)gated_cross_attn_layers\.(\d+)\.(.+)"),
        "cross_attn.",
        _LLAMA | {"alpha_cross_attn": ("gate.gate",), "alpha_dense": ("feed_forward_gate.gate",)},
        {"norm": "rms", "activation": "swiglu", "feed_forward_all": True},
        {
            "cross_attn.q_layer_norm.weight": ("attention.q_norm.weight",),
            "cross_attn.k_layer_norm.weight": ("attention.kv_proj.k_norm.weight",),
        },
    ),
    "mllama": Family(
        re.compile(r"(.*\.|)layers\.(\d+)\.(.+)"),
        "cross_attn",
        _LLAMA | {"cross_attn_attn_gate": ("gate.gate",), "cross_attn_mlp_gate": ("feed_forward_gate.gate",)},
        {"norm": "rms", "activation": "swiglu"},
        {
            "cross_attn.q_norm.weight": ("attention.q_norm.weight",),
            "cross_attn.k_norm.weight": ("attention.kv_proj.k_norm.weight",),
        },
    ),
    "openflamingo": Family(
        re.compile(r"(.*\.|)(\d+)\.gated_cross_attn_layer\.(.+)"),
        "attn",
        {
            "attn.norm.weight": ("norm.weight",),
            "attn.norm.bias": ("norm.bias",),
            "attn.to_q.weight": ("attention.q_proj.weight",),
            "attn.to_kv.weight": ("attention.kv_proj.k_proj.weight", "attention.kv_proj.v_proj.weight"),
            "attn.to_out.weight": ("attention.out_proj.weight",),
            "attn_gate": ("gate.gate",),
            "ff.0.weight": ("feed_forward.norm.weight",),
            "ff.0.bias": ("feed_forward.norm.bias",),
            "ff.1.weight": ("feed_forward.up.weight",),
            "ff.3.weight": ("feed_forward.down.weight",),
            "ff_gate": ("feed_forward_gate.gate",),
        },
        {"feed_forward_all": True},
        head_dim=64,
    ),
}

_GATES = ("alpha_cross_attn", "alpha_dense", "cross_attn_attn_gate", "cross_attn_mlp_gate", "attn_gate", "ff_gate")
# Old files keep the rotary table of a class that the cross-attention shares and does not use.
_UNUSED = "cross_attn.rotary_emb.inv_freq"


#: By number of a block, its tensors: from their name within the block to the full name.
Blocks = dict[int, dict[str, str]]


def read_published(
    family: str,
    tensors: Mapping[str, Tensor],
    host: nn.Module,
    num_heads: int | None,
    source: str,
    **settings: Any,
) -> tuple[GatedAdapter, dict[str, Tensor]]:
    """Return settings and weights of the gated blocks among the tensors of a published model, whose rest is ignored."""
    depth = depth_of(host)
    if depth is None:
        raise AdapterFileError(
            f"cannot load {family} onto {type(host).__name__}: its config has no num_hidden_layers; is it a language "
            "model?"
        )
    spec = FAMILIES[check_choice("family", family, tuple(FAMILIES))]
    blocks, others = _find_blocks(family, spec, tensors, source)
    names = _names(family, spec, blocks, source)
    layers = _layers(family, sorted(blocks), others, depth, source)
    lowest = {theirs: tensors[blocks[min(blocks)][theirs]] for theirs in names}
    first = {ours: lowest[theirs] for theirs, all_ours in names.items() for ours in all_ours}
    adapter = GatedAdapter(
        **_sizes(spec, first, host, num_heads, source),
        layers=layers,
        position="before",
        layout=GatedLayout(**spec.layout, **_epsilon(spec, host, source), memory_norm=False),
        **settings,
    )
    with torch.device("meta"):
        sites = [Site(layer, "before", "", width_of(host), torch.device("meta")) for layer in layers]
        shapes = {name: value.shape for name, value in GatedLayers(adapter, sites).state_dict().items()}
    by_layer = {layer: blocks[number] for layer, number in zip(layers, sorted(blocks), strict=True)}
    return adapter, _weights(names, by_layer, tensors, shapes, source)


def _names(family: str, known: Family, blocks: Blocks, source: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a block's tensors and ours; refuse blocks that lack one or have another."""
    normed = family == "mllama" or any(name in block for block in blocks.values() for name in known.norms)
    names = {**known.names, **(known.norms if normed else {})}
    missing = [_prefix(block) + name for block in blocks.values() for name in names if name not in block]
    unknown = [block[name] for block in blocks.values() for name in block if name not in names]
    refuse_keys(source, f"the gated cross-attention of {family}", missing, unknown)
    return names


def _weights(
    names: Mapping[str, tuple[str, ...]],
    blocks: Blocks,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    source: str,
) -> dict[str, Tensor]:
    """Return the tensors of blocks by host layer under our names and in our shapes; refuse those that do not fit."""
    state: dict[str, Tensor] = {}
    wrong = []
    for layer, block in blocks.items():
        for theirs, all_ours in names.items():
            value, ours = tensors[block[theirs]], [f"blocks.{layer}.{one}" for one in all_ours]
            shape = shapes[ours[0]]
            # Gates have one number, or one for each channel, in axes of their own.
            needed = (shape[0] * len(ours), *shape[1:]) if shape else (1,)
            actual = value.shape[-1:] if theirs in _GATES and value.shape[:-1].numel() == 1 else value.shape
            if tuple(actual) != needed or not value.is_floating_point():
                wrong.append(f"{block[theirs]} {list(value.shape)} of {value.dtype}, needed {list(needed)} floats")
                continue
            check_values(block[theirs], value)
            state.update(zip(ours, (part.reshape(shape) for part in value.chunk(len(ours))), strict=True))
    if wrong:
        raise AdapterFileError(
            f"{source}: {len(wrong)} tensors do not fit: {'; '.join(wrong[:5])}{'; …' if len(wrong) > 5 else ''}; the "
            "host must be the model's own text part"
        )
    return state


def _find_blocks(family: str, known: Family, tensors: Mapping[str, Tensor], source: str) -> tuple[Blocks, int]:
    """Return the blocks by number, and the number of other layers."""
    layers: dict[str, Blocks] = {}
    for name in tensors:
        matched = known.block.fullmatch(name)
        if matched is not None and matched[3] != _UNUSED:
            layers.setdefault(matched[1], {}).setdefault(int(matched[2]), {})[matched[3]] = name
    models = {}
    for prefix, numbered in layers.items():
        blocks = {n: block for n, block in numbered.items() if any(name.startswith(known.marker) for name in block)}
        if blocks:
            models[prefix] = blocks
    if len(models) != 1:
        what = f"several models ({sorted(models)})" if models else f"no gated cross-attention of {family}"
        raise AdapterFileError(f"{source} holds {what}, searched for by the names {known.block.pattern!r}")
    ((prefix, blocks),) = models.items()
    return blocks, len(layers[prefix]) - len(blocks)


def _prefix(block: Mapping[str, str]) -> str:
    name, full = next(iter(block.items()))
    return full.removesuffix(name)


def _layers(family: str, numbers: list[int], others: int, depth: int, source: str) -> tuple[int, ...]:
    """Return the numbers of the host layers that the blocks come before."""
    count, layers = len(numbers), tuple(numbers)
    if family == "idefics":
        # Block i comes before layer i · interval.
        if numbers != list(range(count)) or depth % count:
            raise AdapterFileError(f"{source} has blocks {numbers}, which do not divide the {depth} layers of the host")
        return tuple(number * depth // count for number in numbers)
    if family == "mllama":
        # Blocks are numbered among the layers, and the host has only the others: count its layers without blocks.
        layers = tuple(number - before for before, number in enumerate(numbers))
        if others not in (0, depth) or len(set(layers)) != len(layers):
            raise AdapterFileError(
                f"{source} has cross-attention layers {numbers} and {others} others, the host has {depth} layers: "
                "give the host of these others; cross-attention layers must not follow each other"
            )
    if layers[-1] >= depth:
        raise AdapterFileError(
            f"{source} has blocks {numbers}, the last before layer {layers[-1]}; this host has layers 0 to {depth - 1}"
        )
    return layers


def _sizes(known: Family, first: Mapping[str, Tensor], host: nn.Module, num_heads: int | None, source: str) -> Settings:
    """Return the settings that follow from the shapes of a block and from the host."""
    q, k, up = (first[f"{name}.weight"] for name in ("attention.q_proj", "attention.kv_proj.k_proj", "feed_forward.up"))
    if not all(matrix.dim() == 2 and matrix.numel() for matrix in (q, k, up)):
        raise AdapterFileError(f"{source}: the projections must be matrices, got {[list(m.shape) for m in (q, k, up)]}")
    width = width_of(host)
    if q.shape[1] != width:
        raise AdapterFileError(f"{source} is for a text model {q.shape[1]} wide, and this host is {width} wide")
    norm = first.get("attention.q_norm.weight")
    rows, kv_rows = q.shape[0], k.shape[0] // max(len(stacked) for stacked in known.names.values())
    if num_heads is not None:
        head_dim = rows // check_int("num_heads", num_heads)
    elif norm is not None:
        head_dim = norm.numel()
    else:
        head_dim = known.head_dim or rows // getattr(text_config(host), "num_attention_heads", 1)
    if not head_dim or rows % head_dim or kv_rows % head_dim:
        raise AdapterFileError(
            f"{source}: {rows} rows of queries and {kv_rows} of keys are not a whole number of heads; give num_heads="
        )
    multiple = up.shape[0] / width
    return {
        "memory_dim": k.shape[1],
        "num_heads": rows // head_dim,
        "head_dim": head_dim,
        "num_kv_heads": None if kv_rows == rows else kv_rows // head_dim,
        # int(feed_forward · width) is the hidden width.
        "feed_forward": multiple if int(multiple * width) == up.shape[0] else math.nextafter(multiple, math.inf),
        "gate": "channel" if first["gate.gate"].numel() > 1 else "scalar",
        "qk_norm": norm is not None,
    }


def _epsilon(known: Family, host: nn.Module, source: str) -> Settings:
    """Return the epsilon of RMSNorm, that of the text model, for families that have the norm."""
    if known.layout.get("norm") != "rms":
        return {}
    epsilon, activation = (getattr(text_config(host), name, None) for name in ("rms_norm_eps", "hidden_act"))
    if epsilon is None or activation not in ("silu", "swish"):
        raise AdapterFileError(
            f"{source} needs a text model with RMSNorm and SwiGLU; this host has epsilon {epsilon} and "
            f"activation {activation!r}"
        )
    return {"norm_eps": epsilon}
