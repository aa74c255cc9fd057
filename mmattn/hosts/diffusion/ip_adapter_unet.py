"""Published IP-Adapter checkpoints (arXiv 2308.06721), read onto a UNet and written back.

The layout is that of the authors: `image_proj.proj`, `image_proj.norm`, and `ip_adapter.1.to_k_ip`, `.to_v_ip`, `3`,
`5`, … in the order of the host's `attn_processors`. Files of the Plus, Full and FaceID kind hold other image
projections and are refused.
"""

from __future__ import annotations

import re
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.decoupled.adapter import DecoupledAdapter
from mmattn.errors import AdapterFileError, ConditionError, ConfigError
from mmattn.hosts.diffusion.heads import head_size
from mmattn.hosts.diffusion.ip_adapter_files import check_tensors, read_file, write_file
from mmattn.hosts.diffusion.unet_layers import find_layer_names, text_width

PROJECTION = {
    "image_proj.proj.weight": "projection.weight",
    "image_proj.proj.bias": "projection.bias",
    "image_proj.norm.weight": "memory_norm.weight",
    "image_proj.norm.bias": "memory_norm.bias",
}
_BLOCK = re.compile(r"ip_adapter\.(\d+)\.to_([kv])_ip\.weight")


def read_ip_adapter(host: nn.Module, path: str | PathLike[str]) -> tuple[DecoupledAdapter, dict[str, Tensor]]:
    """The settings and weights of an IP-Adapter checkpoint, for this host; nothing is changed.

    Args:
        host: the UNet.
        path: the file.

    Raises:
        AdapterFileError: the file is torn, of another kind, or for another base model.
    """
    tensors = read_file(path)
    strange = [name for name in tensors if name not in PROJECTION and not _BLOCK.fullmatch(name)]
    missing = [name for name in PROJECTION if name not in tensors]
    if strange or missing:
        raise AdapterFileError(
            f"{str(path)!r} is not a plain IP-Adapter: it lacks {missing} and holds {strange[:3]}"
            f"{' …' if len(strange) > 3 else ''}; files of the Plus, Full and FaceID kind are not read"
        )
    names, width = find_layer_names(host), text_width(host)
    state = {own: tensors[name] for name, own in PROJECTION.items()}
    expected = {}
    for index, layer_name in enumerate(names):
        heads = head_size(host.get_submodule(layer_name))
        for letter in "kv":
            name = f"ip_adapter.{2 * index + 1}.to_{letter}_ip.weight"
            expected[name] = (heads.num_kv_heads * heads.head_dim, width)
            state[f"blocks.{index}.{letter}_proj.weight"] = tensors.get(name, torch.empty(0))
    given = {name: tuple(value.shape) for name, value in tensors.items() if name not in PROJECTION}
    if given != expected:
        widths = sorted({shape[-1] for shape in given.values() if shape})
        raise AdapterFileError(
            f"{str(path)!r} is for another base model: it has {len(given) // 2} layers for text {widths} wide, "
            f"and this {type(host).__name__} has {len(names)} for text {width} wide; load it onto that base"
        )
    shapes = [tuple(tensors[name].shape) for name in PROJECTION]
    rows, memory_dim = shapes[0] if len(shapes[0]) == 2 else (0, 0)
    if rows % width or shapes != [(rows, memory_dim), (rows,), (width,), (width,)]:
        raise AdapterFileError(
            f"{str(path)!r}: an image projection of {shapes} gives no whole number of slots {width} wide"
        )
    check_tensors(path, tensors)
    try:
        return DecoupledAdapter(memory_dim=memory_dim, tokens=rows // width), state
    except ConfigError as error:
        raise AdapterFileError(f"{str(path)!r}: {error}") from error


def write_ip_adapter(model: Any, path: str | PathLike[str], name: str) -> None:
    """Write the adapter `name` in the layout of IP-Adapter, atomically.

    Args:
        model: the adapted UNet.
        path: the file.
        name: of the adapter.

    Raises:
        ConditionError: it has blocks at some layers only, a resampler, or no image projection.
        OSError: the folder is missing or not writable; a file that was there is unchanged.
    """
    adapter = model.adapter(name)
    names = dict(PROJECTION)
    for index in range(len(model.layer_names)):
        for letter in "kv":
            names[f"ip_adapter.{2 * index + 1}.to_{letter}_ip.weight"] = f"blocks.{index}.{letter}_proj.weight"
    state = {key: value.detach().contiguous().cpu() for key, value in adapter.state_dict().items()}
    if set(state) != set(names.values()):
        raise ConditionError(
            f"adapter {name!r} cannot be written as an IP-Adapter, which has tokens=, blocks at all layers and no "
            "resampler: use save_adapter"
        )
    tensors = {theirs: state[own] for theirs, own in names.items()}
    write_file(path, tensors)
