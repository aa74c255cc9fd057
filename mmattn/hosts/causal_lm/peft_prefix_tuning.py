"""peft's prefix tuning and cartridges, read: one tensor `prompt_embeddings` for the virtual tokens.

Its rows are tokens, and each holds layer by layer the key and the value of every head, (p, n · 2 · g · k) in all with n
layers: what peft puts into the host's cache before the text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mmattn.adapters.prefix import PrefixAdapter, PrefixLayers
from mmattn.adapters.protocols import HeadSizes, Site
from mmattn.errors import AdapterFileError
from mmattn.hosts.attach import adapted_model, attach
from mmattn.hosts.model import AdaptedModel
from mmattn.storage.json_files import read_json
from mmattn.storage.safetensors import check_values

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
KEY = "prompt_embeddings"
#: The kinds of peft that have this layout.
KINDS = ("PREFIX_TUNING", "CARTRIDGE")

Folder = str | PathLike[str]


def load_prefix_tuning(host: nn.Module, folders: Folder | Sequence[Folder], name: str = "default") -> AdaptedModel:
    """Put what peft's prefix tuning trained on a host, as a `PrefixAdapter` with a prefix for each checkpoint.

    Args:
        host: as in `attach`.
        folders: one that `PeftModel.save_pretrained` wrote, or several with equally many virtual tokens.
        name: as in `attach`.

    Returns:
        as `attach` does; row i of a call reads the checkpoint that `memory=` numbers for it.

    Raises:
        AdapterFileError: a folder holds no prefix tuning for a host of these sizes; nothing is changed.
        AttachError: the attention of the host cannot be reached, or the name is taken.
    """
    folders = [folders] if isinstance(folders, (str, PathLike)) else list(folders)
    tensors = [_read(folder) for folder in folders]
    lengths = sorted({len(tensor) for tensor in tensors})
    if len(lengths) != 1:
        raise AdapterFileError(
            f"prefixes of one adapter have one number of virtual tokens, these have {lengths}: load each under a name"
        )
    settings = PrefixAdapter(lengths[0], len(tensors))
    sites = settings.sites(adapted_model(host, None))
    layout = _layout(sites)
    width = len(sites) * 2 * layout.num_kv_heads * layout.head_dim
    for tensor, folder in zip(tensors, folders, strict=True):
        if tensor.shape[1] != width:
            raise AdapterFileError(
                f"the virtual tokens in {str(folder)!r} are {tensor.shape[1]} wide, and this host needs {width} "
                f"({len(sites)} layers, {layout.num_kv_heads} key/value heads): load the host they were trained on"
            )
    model = attach(host, settings, name)
    adapter = model.adapter(name)
    assert isinstance(adapter, PrefixLayers)
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            split = tensor.view(len(tensor), len(adapter.layers), 2, layout.num_kv_heads, layout.head_dim)
            for place, layer in enumerate(adapter.layers):
                block = adapter.prefix(layer)
                block.keys[number] = split[:, place, 0].transpose(0, 1).to(block.keys)
                block.values[number] = split[:, place, 1].transpose(0, 1).to(block.values)
    return model


def _read(folder: Folder) -> Tensor:
    """Return the virtual tokens (p, n · 2 · g · k) of a checkpoint."""
    source = repr(os.fspath(folder))
    try:
        config = read_json(os.path.join(folder, CONFIG))
        tensors = load_file(os.path.join(folder, TENSORS))
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterFileError(f"{source} holds no checkpoint of peft ({CONFIG} and {TENSORS}): {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in KINDS:
        raise AdapterFileError(f"{source} is a checkpoint of peft's {kind}, and not of {' or '.join(KINDS)}")
    tensor = tensors.get(KEY)
    if tensor is None or tensor.dim() != 2 or not tensor.is_floating_point():
        raise AdapterFileError(f"{source} holds {sorted(tensors)[:5]}, and not {KEY} (virtual tokens, width)")
    check_values(KEY, tensor)
    return tensor


def _layout(sites: Sequence[Site]) -> HeadSizes:
    """Return the sizes of every layer, which must be equal."""
    first, *others = {
        HeadSizes(1, site.heads.num_kv_heads, site.heads.head_dim, site.heads.value_dim or site.heads.head_dim)
        for site in sites
        if site.heads is not None
    }
    if others or first.value_dim != first.head_dim:
        raise AdapterFileError(
            "peft's prefix tuning has keys and values of one size in all layers, and those of this host differ"
        )
    return first
