"""An adapter on a host to a folder and back: what the files say of the host, and whether this one is it."""

from __future__ import annotations

import os
import warnings
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmattn import __version__
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.chunked import ChunkedAdapter
from mmattn.adapters.composed import ComposedAdapter
from mmattn.adapters.config_file import FORMAT, FORMAT_VERSION
from mmattn.adapters.decoupled import DecoupledAdapter
from mmattn.adapters.folder import adapter_settings, check_tensors, load_folder, parse_config, save_folder
from mmattn.adapters.gated import GatedAdapter
from mmattn.core.projection import upgrade_state_names
from mmattn.errors import AdapterFileError, AttachError, ConfigError
from mmattn.hosts.causal_lm.decoder_layers import pick_layers
from mmattn.hosts.causal_lm.layer_search import find_layers, host_depth, host_width, text_config
from mmattn.hosts.interop.sharded import shards
from mmattn.hosts.unet.attention_layers import find_places, head_size, pick_places, text_width
from mmattn.storage.tensor_files import fingerprint

if TYPE_CHECKING:
    from mmattn.hosts.adapted import AdaptedModel
    from mmattn.hosts.causal_lm.model import AdaptedCausalLM
    from mmattn.hosts.unet.model import AdaptedUNet

LanguageAdapter = GatedAdapter | ChunkedAdapter | ComposedAdapter

KINDS: dict[str, type[LanguageAdapter] | type[DecoupledAdapter]] = {
    GatedAdapter.kind: GatedAdapter,
    ChunkedAdapter.kind: ChunkedAdapter,
    ComposedAdapter.kind: ComposedAdapter,
    DecoupledAdapter.kind: DecoupledAdapter,
}

CALLS = {
    GatedAdapter.kind: "model.generate(input_ids, memory=memory)",
    ChunkedAdapter.kind: "model.generate(input_ids, memory=retrieve)",
    ComposedAdapter.kind: "model.generate(input_ids, memory=mmattn.AugmentingModel(lm))",
    DecoupledAdapter.kind: "model(sample, timestep, text, memory=memory)",
}


def host_sizes(host: nn.Module, kind: str) -> dict[str, int | None]:
    """The sizes of a host that an adapter of this kind must fit: of a UNet, its text's width and attention layers.

    Raises:
        AttachError: no host for this kind of adapter.
    """
    if kind == DecoupledAdapter.kind:
        return {"hidden_size": text_width(host), "num_layers": len(find_places(host))}
    return {"hidden_size": host_width(host), "num_layers": host_depth(host)}


def picked_layers(host: nn.Module, settings: LanguageAdapter | DecoupledAdapter, path: str | None) -> list[int]:
    """The layers that these settings ask for on this host.

    Raises:
        AttachError: the host has no such layers, or cannot be told where they are.
    """
    from mmattn.hosts.adapted import find_adapted

    if isinstance(settings, DecoupledAdapter):
        return pick_places(settings, find_places(host))
    known: Any = find_adapted(host)
    return pick_layers(settings, len(find_layers(host, path)[1] if known is None else known.layers))


def build(host: nn.Module, settings: LanguageAdapter | DecoupledAdapter, layers: list[int]) -> AdapterLayers:
    """The trainable part that these settings give on this host."""
    if isinstance(settings, DecoupledAdapter):
        places = find_places(host)
        sizes = [head_size(host.get_submodule(places[layer])) for layer in layers]
        return settings.build(text_width(host), layers, sizes)
    return settings.build(host_width(host), layers)


def describe_host(host: nn.Module, kind: str) -> dict[str, Any]:
    """What an adapter remembers of its host: class, family, sizes, and a fingerprint of the weights."""
    get_base: Any = getattr(host, "get_base_model", None)
    inner: nn.Module = host if get_base is None else get_base()
    return {
        "class": type(inner).__name__,
        "model_type": getattr(text_config(inner), "model_type", None),
        **host_sizes(inner, kind),
        "fingerprint": None if elsewhere(inner) else fingerprint(inner.state_dict()),
    }


def elsewhere(host: nn.Module) -> bool:
    """Whether some weights are not here, but offloaded or with other processes, so that they cannot be told apart."""
    return bool(shards(host)) or any(parameter.device.type == "meta" for parameter in host.parameters())


def save(model: AdaptedModel, folder: str | PathLike[str], name: str, encoder: str | None) -> None:
    """Write the adapter `name` of a host as a folder.

    Raises:
        ConfigError: its kind is not one of the package's.
    """
    adapter = model._adapter(name)
    if adapter.config.kind not in KINDS:
        raise ConfigError(
            f"adapters of kind {adapter.config.kind!r} are your own, and load() could not make one again (it knows "
            f"{', '.join(sorted(KINDS))}): keep its state_dict() with safetensors, and attach it again"
        )
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "mmattn_version": __version__,
        "kind": adapter.config.kind,
        "adapter": adapter_settings(adapter.config),
        "layers": list(adapter.layers),
        "host": describe_host(model.host, adapter.config.kind),
        "encoder": encoder,
        "name": name,
    }
    save_folder(folder, config=config, tensors=adapter.state_dict(), card=card(config, adapter))


def card(config: dict[str, Any], adapter: nn.Module) -> str:
    """The README of an adapter's folder."""
    host = config["host"]
    count = sum(parameter.numel() for parameter in adapter.parameters())
    return f"""---
library_name: mmattn
tags: [mmattn, cross-attention, adapter]
---

# A {config["kind"]} cross-attention adapter for {host["class"]}

{count:,} parameters at layers {config["layers"]} of a host with {host["num_layers"]} such layers, width
{host["hidden_size"]} (weights {(host["fingerprint"] or "unknown")[:12]}). It reads memories of width
{config["adapter"]["memory_dim"]}{f" from the encoder {config['encoder'][:24]}" if config["encoder"] else ""}.

```python
import mmattn

model = mmattn.load(host, "this folder")
{CALLS[config["kind"]]}
```

Written by mmattn {config["mmattn_version"]}.
"""


def load(host: nn.Module, folder: str | PathLike[str], name: str, path: str | None) -> AdaptedCausalLM | AdaptedUNet:
    """Put the adapter in a folder on a host, checking everything before the host is touched."""
    from mmattn.hosts import attach
    from mmattn.hosts.adapted import AdaptedModel

    if isinstance(host, AdaptedModel):
        host = host.host
    if os.path.isfile(folder):
        return load_ip_adapter(host, folder, name)

    def check(config: dict[str, Any], shapes: Any) -> None:
        settings = parse_config(config, KINDS)
        wanted, here = config["host"], host_sizes(host, config["kind"])
        if any(wanted[size] != here[size] for size in here):
            raise AdapterFileError(
                f"this adapter was made for a {wanted['class']} with {wanted['num_layers']} layers of width "
                f"{wanted['hidden_size']}; this host is a {type(host).__name__} with {here['num_layers']} layers of "
                f"width {here['hidden_size']}: load that host"
            )
        picked = picked_layers(host, settings, path)
        if picked != config["layers"]:
            raise AdapterFileError(
                f"the config says layers {config['layers']} and its settings give {picked} on this host: one was edited"
            )
        with torch.device("meta"):
            expected = build(host, settings, picked).state_dict()
        shapes = upgrade_state_names(shapes)
        check_tensors({key: (tuple(value.shape), value.dtype) for key, value in expected.items()}, shapes)

    try:
        config, tensors = load_folder(folder, check)
    except AttachError as error:
        raise AdapterFileError(f"cannot load an adapter onto {type(host).__name__}: {error}") from error
    settings = parse_config(config, KINDS)
    here, there = describe_host(host, settings.kind)["fingerprint"], config["host"]["fingerprint"]
    if here is not None and there is not None and here != there:
        warnings.warn(
            f"the weights of this {type(host).__name__} are not those the adapter in {str(folder)!r} was trained on: "
            "another revision or a fine-tuned copy; what it says may be worse than what was measured",
            stacklevel=3,
        )
    model = attach(host, settings, name, path=path)
    model._adapter(name).load_state_dict(upgrade_state_names(tensors))
    return model


def load_ip_adapter(host: nn.Module, path: str | PathLike[str], name: str) -> AdaptedUNet:
    """Put an IP-Adapter's single file on a host."""
    from mmattn.hosts import attach
    from mmattn.hosts.unet.ip_adapter import read_ip_adapter

    try:
        settings, tensors = read_ip_adapter(host, path)
    except AttachError as error:
        raise AdapterFileError(f"cannot load an IP-Adapter onto {type(host).__name__}: {error}") from error
    model = attach(host, settings, name)
    model._adapter(name).load_state_dict(tensors)
    return model
