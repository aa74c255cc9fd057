"""peft's prefix tuning and cartridges, read and written: one tensor `prompt_embeddings` for the virtual tokens.

Its rows are tokens, and each holds layer by layer the key and the value of every head, (p, n · 2 · g · k) in all with n
layers: what peft puts into the host's cache before the text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from mmattn.adapters.prefix.adapter import PrefixAdapter, PrefixLayers
from mmattn.adapters.protocols import HeadSizes, Site
from mmattn.errors import AdapterFileError, AttachError
from mmattn.hosts.attach import adapted_model, attach
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.ownership import adapted
from mmattn.storage.files import replacing
from mmattn.storage.json_files import read_json, write_json
from mmattn.storage.safetensors import check_values

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
KEY = "prompt_embeddings"
#: The kinds of peft that have this layout.
KINDS = ("PREFIX_TUNING", "CARTRIDGE")

Folder = str | PathLike[str]


def load_prefix_tuning(host: nn.Module, folders: Folder | Sequence[Folder], name: str = "default") -> Any:
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
    lengths = sorted({len(one) for one in tensors})
    if len(lengths) != 1:
        raise AdapterFileError(
            f"prefixes of one adapter have one number of virtual tokens, these have {lengths}: load each under a name"
        )
    if isinstance(host, AdaptedModel):
        host = host.host
    settings: Any = PrefixAdapter(lengths[0], len(tensors))
    sites = settings.sites(adapted(host) or adapted_model(host, None))
    layout = _layout(sites)
    width = len(sites) * 2 * layout.num_kv_heads * layout.head_dim
    for tensor, folder in zip(tensors, folders, strict=True):
        if tensor.shape[1] != width:
            raise AdapterFileError(
                f"the virtual tokens in {str(folder)!r} are {tensor.shape[1]} wide, and this host needs {width} "
                f"({len(sites)} layers, {layout.num_kv_heads} key/value heads): load the host they were trained on"
            )
    model = attach(host, settings, name)
    adapter: Any = model.adapter(name)
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            split = tensor.view(len(tensor), len(adapter.layers), 2, layout.num_kv_heads, layout.head_dim)
            for place, layer in enumerate(adapter.layers):
                block = adapter.prefix(layer)
                block.keys[number] = split[:, place, 0].transpose(0, 1).to(block.keys)
                block.values[number] = split[:, place, 1].transpose(0, 1).to(block.values)
    return model


def save_prefix_tuning(model: AdaptedModel, folder: Folder, prefix: int = 0, name: str = "default") -> None:
    """Write one prefix as a checkpoint of peft's prefix tuning, which `PeftModel.from_pretrained` reads.

    Args:
        model: the adapted model.
        folder: where to.
        prefix: number of the prefix.
        name: of its `PrefixAdapter`.

    Raises:
        AttachError: another kind of adapter, or no prefix of this number.
        AdapterFileError: layers of several sizes, which peft's layout cannot hold.
    """
    adapter = model.adapter(name)
    if not isinstance(adapter, PrefixLayers) or not 0 <= prefix < adapter.config.num_prefixes:
        raise AttachError(
            f"adapter {name!r} (kind {adapter.config.kind!r}) has no prefix {prefix}: name a PrefixAdapter, and a "
            "prefix from 0 to num_prefixes - 1"
        )
    layout = _layout(adapter.sites)
    parts = []
    for layer in adapter.layers:
        block = adapter.prefix(layer)
        parts += [one.detach()[prefix].transpose(0, 1).flatten(1).float().cpu() for one in (block.keys, block.values)]
    tensor = torch.cat(parts, 1)
    check_values(KEY, tensor)
    os.makedirs(folder, exist_ok=True)
    with replacing(os.path.join(folder, TENSORS)) as file:
        file.write(save({KEY: tensor.contiguous()}))
    inner: Any = model.host
    config = {
        "peft_type": "PREFIX_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(inner.config, "_name_or_path", "") or None,
        "inference_mode": True,
        "num_virtual_tokens": len(tensor),
        "num_layers": len(adapter.layers),
        "num_attention_heads": layout.num_kv_heads,
        "token_dim": layout.num_kv_heads * layout.head_dim,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        "encoder_hidden_size": layout.num_kv_heads * layout.head_dim,
    }
    write_json(os.path.join(folder, CONFIG), config)


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
