"""Published IP-Adapters of Flux, in the layout of XLabs: read onto a transformer and written back.

`ip_adapter_proj_model` projects an image to slots; `double_blocks.0.processor.ip_adapter_double_stream_k_proj` and
`…_v_proj`, `1`, `2`, … give keys and values, and what the queries find is added to what the block hands on. The names
by which diffusers knows them (`image_proj`, `ip_adapter.0.to_k_ip`) are read, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import Tensor

from mmattn.adapters.decoupled.adapter import DecoupledAdapter, DecoupledLayout
from mmattn.errors import AdapterFileError, ConditionError, ConfigError
from mmattn.hosts.diffusion.find_attention import JOINT
from mmattn.hosts.diffusion.heads import head_size
from mmattn.hosts.diffusion.ip_adapter_files import check_tensors, write_file

_PROJECTION = {
    "proj.weight": "projection.weight",
    "proj.bias": "projection.bias",
    "norm.weight": "memory_norm.weight",
    "norm.bias": "memory_norm.bias",
}
_PROJECTED = re.compile(r"(?:image_proj|ip_adapter_proj_model)\.(.+)")
_BLOCK = re.compile(
    r"(?:ip_adapter\.(\d+)\.to_([kv])_ip|double_blocks\.(\d+)\.processor\.ip_adapter_double_stream_([kv])_proj)"
    r"\.(weight|bias)"
)


def read_flux(
    model: Any, tensors: Mapping[str, Tensor], path: str | PathLike[str]
) -> tuple[DecoupledAdapter, dict[str, Tensor]]:
    """The settings and weights of an IP-Adapter of Flux, for this host; nothing is changed.

    Args:
        model: the adapted transformer.
        tensors: of the file, by name.
        path: of the file.

    Raises:
        AdapterFileError: it is of another kind, or for another base model.
    """
    state, strange = {}, []
    layers = double_layers(model)
    for name, value in tensors.items():
        projected, block = _PROJECTED.fullmatch(name), _BLOCK.fullmatch(name)
        if projected is not None and projected[1] in _PROJECTION:
            state[_PROJECTION[projected[1]]] = value
        elif block is not None:
            number = int(block[1] or block[3] or 0)
            layer = layers[number] if number < len(layers) else f"none of number {number}"
            state[f"blocks.{layer}.{block[2] or block[4]}_proj.{block[5]}"] = value
        else:
            strange.append(name)
    missing = [name for name in _PROJECTION.values() if name not in state]
    if strange or missing:
        raise AdapterFileError(
            f"{str(path)!r} is no IP-Adapter of Flux as XLabs released it: it lacks {missing} and holds {strange[:3]}"
        )
    (rows, memory_dim), (slot_dim,) = state["projection.weight"].shape, state["memory_norm.weight"].shape
    expected: dict[str, tuple[int, ...]] = {
        "projection.weight": (rows, memory_dim),
        "projection.bias": (rows,),
        "memory_norm.weight": (slot_dim,),
        "memory_norm.bias": (slot_dim,),
    }
    for layer in layers:
        heads = head_size(model.layer(layer))
        width = heads.num_heads * heads.head_dim
        for letter in "kv":
            expected[f"blocks.{layer}.{letter}_proj.weight"] = (width, slot_dim)
            expected[f"blocks.{layer}.{letter}_proj.bias"] = (width,)
    given = {name: tuple(value.shape) for name, value in state.items()}
    if not layers or given != expected or rows % slot_dim:
        wrong = sorted(name for name in set(given) | set(expected) if given.get(name) != expected.get(name))
        raise AdapterFileError(
            f"{str(path)!r} is for another base model than this {type(model.host).__name__} with {len(layers)} blocks "
            f"of joint attention: {wrong[:3]} differ; load it onto that base"
        )
    check_tensors(path, tensors)
    names = tuple(model.attention(layer).name for layer in layers)
    blocks = None if len(layers) == len(model.layer_names) or _are_default(model, layers) else names
    layout = DecoupledLayout(slot_dim=slot_dim, bias=True, added_to="block")
    try:
        return DecoupledAdapter(memory_dim, tokens=rows // slot_dim, blocks=blocks, layout=layout), state
    except ConfigError as error:
        raise AdapterFileError(f"{str(path)!r}: {error}") from error


def write_flux(model: Any, path: str | PathLike[str], name: str) -> None:
    """Write the adapter `name` in the layout of XLabs, atomically.

    Args:
        model: the adapted transformer.
        path: the file.
        name: of the adapter.

    Raises:
        ConditionError: it is not built as that layout, or has blocks at some layers only.
        OSError: the folder is missing or not writable; a file that was there is unchanged.
    """
    adapter = model.adapter(name)
    names = {own: f"ip_adapter_proj_model.{theirs}" for theirs, own in _PROJECTION.items()}
    for number, layer in enumerate(double_layers(model)):
        for letter in "kv":
            for kind in ("weight", "bias"):
                theirs = f"double_blocks.{number}.processor.ip_adapter_double_stream_{letter}_proj.{kind}"
                names[f"blocks.{layer}.{letter}_proj.{kind}"] = theirs
    state = {key: value.detach().contiguous().cpu() for key, value in adapter.state_dict().items()}
    if set(state) != set(names) or not adapter.adds_to_block:
        raise ConditionError(
            f"adapter {name!r} cannot be written as an IP-Adapter of Flux, which has tokens=, blocks at all joint "
            "layers, no resampler and layout=DecoupledLayout(bias=True, added_to='block'): use save_adapter"
        )
    write_file(path, {names[own]: value for own, value in state.items()})


def double_layers(model: Any) -> list[int]:
    """Numbers of the layers in which picture and text are two streams with one softmax."""
    return [index for index, layer in enumerate(model.found.layers) if layer.kind == JOINT]


def _are_default(model: Any, layers: list[int]) -> bool:
    return layers == [site.layer for site in model.sites("inside") if site.part != "stream"]
