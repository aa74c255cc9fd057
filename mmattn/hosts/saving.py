"""Checkpoints of adapted models, in folders and on the hub: adapters and other trained weights, never the host."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mmattn import __version__
from mmattn.adapters.base import AdapterLayers, adapter_kinds
from mmattn.adapters.files import (
    CARD,
    CONFIG,
    FORMAT,
    FORMAT_VERSION,
    TENSORS,
    adapter_settings,
    check_config,
    save_folder,
)
from mmattn.adapters.host_models import is_on_disk, text_config
from mmattn.adapters.protocols import Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.hosts.peft import inner_host
from mmattn.hosts.stored import shards
from mmattn.storage.json_files import parse_json
from mmattn.storage.safetensors import fingerprint

DEFAULT = "default"
SETTINGS = "adapter_config"
"""Beside the weights of an adapter in a state dict: its settings, the bytes of their JSON as a tensor."""
STATE = "model.safetensors"
"""The file that Trainers, and accelerate, write a state dict to."""
_MAX_JSON = 1 << 20
#: The content of `adapter_config.json`, or its entry "host".
Description = dict[str, Any]


def keep_trained(state: dict[str, Tensor], prefix: str, host: nn.Module, configs: Mapping[str, Description]) -> None:
    """Take the frozen parameters of a host out of a state dict, and put the settings of the adapters in."""
    trained = {f"{prefix}host.{name}" for name in trained_names(host)}
    for key in [key for key in state if key.startswith(f"{prefix}host.") and key not in trained]:
        del state[key]
    for name, config in configs.items():
        state[f"{prefix}adapters.{name}.{SETTINGS}"] = torch.tensor(
            list(json.dumps(config).encode()), dtype=torch.uint8
        )


def trained_names(host: nn.Module) -> set[str]:
    """Return the names of the trained parameters of a host."""
    named = host.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad}


def is_registered(config: AdapterConfig) -> bool:
    """Return whether `load` can make an adapter of these settings."""
    return adapter_kinds().get(config.kind) is type(config)


def write_adapter(folder: str | PathLike[str], adapter: AdapterLayers, config: Description) -> None:
    """Write one adapter as a folder: `adapter_config.json`, `adapter_model.safetensors`, `README.md`."""
    if not is_registered(adapter.config):
        raise ConfigError(
            f"adapters of kind {adapter.config.kind!r} are not registered, so load() could not make one: decorate "
            f"{type(adapter.config).__name__} with mmattn.register_adapter"
        )
    save_folder(folder, config=config, tensors=adapter.state_dict(), card=card(config, adapter))


def saved_settings(state: Mapping[str, Tensor], source: str) -> dict[str, Description]:
    """Return the settings of each adapter in the state dict of an adapted model."""
    settings = {}
    for key in state:
        room, _, rest = key.partition(".")
        name, _, last = rest.partition(".")
        if (room, last) == ("adapters", SETTINGS):
            what = f"{key!r} in {source}"
            config = parse_json(what, bytes(state[key].to(torch.uint8).flatten().tolist()), _MAX_JSON)
            settings[name] = check_config(config, what)
    return settings


# The description of an adapter and its host in its files --------------------------------------------------------------


def adapter_config(
    adapter: AdapterLayers,
    host: nn.Module,
    kind: str,
    sites: Sequence[Site],
    encoder: str | None,
    with_fingerprint: bool,
) -> Description:
    """Return the content of `adapter_config.json`, for an adapter at some of these sites of a host of this kind."""
    inner = inner_host(host)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "mmattn_version": __version__,
        "kind": adapter.config.kind,
        "package": type(adapter.config).__module__.partition(".")[0],
        "adapter": adapter_settings(adapter.config),
        "layers": list(adapter.layers),
        "host": {
            "kind": kind,
            "class": type(inner).__name__,
            "model_type": getattr(text_config(inner), "model_type", None),
            **host_sizes(sites),
            "fingerprint": host_fingerprint(host) if with_fingerprint else None,
        },
        "encoder": encoder,
        "name": adapter.name,
    }


def host_sizes(sites: Sequence[Site]) -> dict[str, int]:
    """Return the sizes of a host that an adapter at these sites must fit."""
    return {"hidden_size": sites[0].width, "num_layers": len(sites)}


def host_fingerprint(host: nn.Module, dtype: torch.dtype | None = None) -> str | None:
    """Return the fingerprint of a host's weights, or None where some of them are elsewhere."""
    inner = inner_host(host)
    elsewhere = any(
        parameter.device.type == "meta" or hasattr(parameter, "full_tensor") for parameter in inner.parameters()
    )
    if elsewhere or is_on_disk(inner) or shards(inner):  # offloaded, or in other processes
        return None
    return fingerprint(inner.state_dict(), dtype)


def card(config: Description, adapter: AdapterLayers) -> str:
    """Return the README of an adapter's folder."""
    host = config["host"]
    count = sum(parameter.numel() for parameter in adapter.parameters())
    width, package = config["adapter"].get("memory_dim"), config["package"]
    memories = getattr(adapter.config, "reads", f"memories of width {width}")
    memories += f" from the encoder {config['encoder'][:24]}" if config["encoder"] else ""
    imports = "import mmattn" if package == "mmattn" else f"import mmattn\nimport {package}  # registers the adapter"
    return f"""---
library_name: mmattn
tags: [mmattn, cross-attention, adapter]
---

# A {config["kind"]} cross-attention adapter for {host["class"]}

{count:,} parameters at layers {config["layers"]} of a host with {host["num_layers"]} such layers, width
{host["hidden_size"]} (weights {(host["fingerprint"] or "unknown")[:12]}). It reads {memories}.

```python
{imports}

model = mmattn.load(host, "this folder")
{adapter.config.example_call}
```

Written by mmattn {config["mmattn_version"]}.
"""


# Repositories of the Hugging Face hub, with the files that `save_adapter` writes --------------------------------------


#: What a folder may hold beside the adapter: what a pipeline needs to run it.
FURTHER = ("pipeline_config.json", "encoder.safetensors")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def local_folder(folder: str | PathLike[str], revision: str | None) -> str | PathLike[str]:
    """Return the local folder of an adapter: the folder itself, or the downloaded files of that repository."""
    if os.path.exists(folder) or not (isinstance(folder, str) and _REPOSITORY.fullmatch(folder)):
        if revision is not None:
            raise ConfigError(f"revision={revision!r} is for names on the hub, and {os.fspath(folder)!r} is a path")
        return folder
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(folder, revision=revision, allow_patterns=[CONFIG, TENSORS, CARD, *FURTHER])
    except (OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise AdapterFileError(
            f"there is no folder {folder!r}, and no adapter of that name{at} on the hub or in its cache ({error}): "
            "correct the name, or save the adapter there first"
        ) from error


class HubOptions(TypedDict, total=False):
    """Options of an upload, as in `transformers.PreTrainedModel.push_to_hub`."""

    private: bool | None
    revision: str | None
    token: str | None
    commit_message: str | None


def upload(folder: str | PathLike[str], repository: str, **options: Unpack[HubOptions]) -> str:
    """Upload the folder of an adapter, creating a missing repository, and return the URL of the commit."""
    from huggingface_hub import HfApi

    hub, revision = HfApi(token=options.get("token")), options.get("revision")
    try:
        repo = hub.create_repo(repository, private=options.get("private"), exist_ok=True)
        if revision is not None:
            hub.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo.repo_id,
            folder_path=os.fspath(folder),
            revision=revision,
            commit_message=options.get("commit_message"),
            allow_patterns=[CONFIG, TENSORS, CARD, *FURTHER],
        )
    except Exception as error:  # its client lets the errors of several libraries through
        raise AdapterFileError(
            f"the adapter could not be uploaded to {repository!r} ({error}): log in with `hf auth login`, give "
            "token=, or name a repository that is yours"
        ) from error
    return str(commit)
