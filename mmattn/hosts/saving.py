"""Checkpoints of adapted models: adapters and other trained weights, never the frozen host."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from typing_extensions import Unpack

from mmattn import __version__
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.diffusers_hooks import is_on_disk
from mmattn.adapters.files import FORMAT, FORMAT_VERSION, adapter_settings, check_config, save_folder
from mmattn.adapters.language_models import text_config
from mmattn.adapters.settings import adapter_kinds
from mmattn.errors import AttachError, ConditionError, ConfigError
from mmattn.hosts.interop.hub import HubOptions, upload
from mmattn.hosts.interop.peft import inner_host
from mmattn.hosts.interop.sharded import shards
from mmattn.hosts.ownership import AttachedModel
from mmattn.storage.fingerprints import fingerprint
from mmattn.storage.json_files import parse_json

DEFAULT = "default"
SETTINGS = "adapter_config"
"""Beside the weights of an adapter in a state dict: its settings, the bytes of their JSON as a tensor."""
STATE = "model.safetensors"
"""The file that Trainers, and accelerate, write a state dict to."""
_MAX_JSON = 1 << 20
#: The content of `adapter_config.json`, or its entry "host".
Description = dict[str, Any]


class SavedModel(AttachedModel):
    """A host and its adapters, whose checkpoints hold what is trained."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self._state_prefix = ""
        self.register_load_state_dict_post_hook(_expect_no_host)

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """Return the adapters with their settings, and trained parameters of the host (a LoRA), no frozen ones.

        So the checkpoints of every trainer stay small, and `mmattn.load` reads what `transformers.Trainer` writes.
        `load_state_dict` does not miss the frozen host, and takes it where it is there. The whole host is in
        `host.state_dict()`.

        Args:
            destination: as in `torch.nn.Module`.
            prefix: as in `torch.nn.Module`.
            keep_vars: as in `torch.nn.Module`; True, as `torch.export` asks, gives all of the host and no settings.
        """
        state: dict[str, Tensor] = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if keep_vars:
            return state
        trained = {f"{prefix}host.{name}" for name in self._trained_of_host()}
        for key in [key for key in state if key.startswith(f"{prefix}host.") and key not in trained]:
            del state[key]
        for name in self.adapters:
            config = self.adapter(name).config
            if adapter_kinds().get(config.kind) is type(config):
                written = json.dumps(adapter_config(self, name, with_fingerprint=False)).encode()
                state[f"{prefix}adapters.{name}.{SETTINGS}"] = torch.tensor(list(written), dtype=torch.uint8)
        return state

    def _trained_of_host(self) -> set[str]:
        named = self.host.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if parameter.requires_grad}

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        self._state_prefix = prefix
        for name in self.adapters:
            state_dict.pop(f"{prefix}adapters.{name}.{SETTINGS}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def save_adapter(self, path: str | PathLike[str], name: str = DEFAULT, *, encoder: str | None = None) -> None:
        """Write one adapter as a folder: `adapter_config.json`, `adapter_model.safetensors`, `README.md`.

        Args:
            path: the folder.
            name: of the adapter.
            encoder: fingerprint of the encoder whose memories it was trained on, written to the file.

        Raises:
            AttachError: there is no such adapter.
            NonFiniteError: a weight is NaN or infinite.
        """
        written = adapter_config(self, name, encoder)
        adapter = self.adapter(name)
        if adapter_kinds().get(adapter.config.kind) is not type(adapter.config):
            raise ConfigError(
                f"adapters of kind {adapter.config.kind!r} are not registered, so load() could not make one: decorate "
                f"{type(adapter.config).__name__} with @mmattn.register_adapter"
            )
        save_folder(path, config=written, tensors=adapter.state_dict(), card=card(written, adapter))

    def push_to_hub(
        self, repository: str, name: str = DEFAULT, *, encoder: str | None = None, **options: Unpack[HubOptions]
    ) -> str:
        """Upload one adapter, and nothing of the host, to the Hugging Face hub.

        Args:
            repository: "org/name"; made where it is missing.
            name: of the adapter.
            encoder: as in `save_adapter`.
            options: `private`, `revision`, `token` and `commit_message`, as in
                `transformers.PreTrainedModel.push_to_hub`; a missing branch is made.

        Returns:
            the address of the commit.

        Raises:
            AdapterFileError: the hub refused it, or cannot be reached.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_adapter(folder, name, encoder=encoder)
            options.setdefault("commit_message", f"Adapter {name}")
            return upload(folder, repository, **options)

    def save_pretrained(
        self,
        save_directory: str | PathLike[str],
        *,
        selected_adapters: Sequence[str] | None = None,
        encoder: str | None = None,
        is_main_process: bool = True,
    ) -> None:
        """Write the adapters and nothing of the host, laid out as peft does; `host.save_pretrained` writes the host.

        The adapter "default" is written into the folder itself, every other one into a folder of its name in it, each
        as `save_adapter` does. `mmattn.load(host, save_directory)` reads the first, and with a name the others.

        Args:
            save_directory: the folder.
            selected_adapters: names of the adapters; all by default.
            encoder: as in `save_adapter`.
            is_main_process: False writes nothing: the other processes of a run.

        Raises:
            AttachError: a name that is not attached, or no adapter at all.
            NonFiniteError: a weight is NaN or infinite.
        """
        names = list(self.adapters) if selected_adapters is None else list(selected_adapters)
        unknown = [name for name in names if name not in self.adapters]
        if unknown or not names:
            raise AttachError(
                f"there are no adapters {unknown or names} to save; attached: {', '.join(self.adapters) or 'none'}. "
                "The host is written by model.host.save_pretrained(folder)"
            )
        if is_main_process:
            for name in names:
                folder = save_directory if name == DEFAULT else os.path.join(save_directory, name)
                self.save_adapter(folder, name, encoder=encoder)

    @classmethod
    def from_pretrained(cls, *args: object, **kwargs: object) -> NoReturn:
        """Refused: an adapted model is made of a host and an adapter's folder, by `mmattn.load(host, folder)`.

        Raises:
            ConditionError: always.
        """
        raise ConditionError(
            f"{cls.__name__} has no from_pretrained: load the host by its own from_pretrained, then the adapter with "
            "model = mmattn.load(host, folder)"
        )


def _expect_no_host(model: nn.Module, keys: _IncompatibleKeys) -> None:
    """Let a state dict go without the frozen host."""
    assert isinstance(model, SavedModel)
    start = f"{model._state_prefix}host."
    trained = {start + name for name in model._trained_of_host()}
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith(start) or key in trained]


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
    model: AttachedModel, name: str, encoder: str | None = None, *, with_fingerprint: bool = True
) -> Description:
    """Return the content of `adapter_config.json`."""
    adapter, inner = model.adapter(name), inner_host(model.host)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "mmattn_version": __version__,
        "kind": adapter.config.kind,
        "package": type(adapter.config).__module__.partition(".")[0],
        "adapter": adapter_settings(adapter.config),
        "layers": list(adapter.layers),
        "host": {
            "kind": model.kind,
            "class": type(inner).__name__,
            "model_type": getattr(text_config(inner), "model_type", None),
            **host_sizes(model, adapter.position),
            "fingerprint": host_fingerprint(model) if with_fingerprint else None,
        },
        "encoder": encoder,
        "name": name,
    }


def host_sizes(model: AttachedModel, position: str) -> dict[str, int]:
    """Return the sizes of a host that an adapter at this position must fit."""
    sites = model.sites(position)
    return {"hidden_size": sites[0].width, "num_layers": len(sites)}


def host_fingerprint(model: AttachedModel, dtype: torch.dtype | None = None) -> str | None:
    """Return the fingerprint of a host's weights, or None where some of them are elsewhere."""
    inner = inner_host(model.host)
    elsewhere = any(one.device.type == "meta" or hasattr(one, "full_tensor") for one in inner.parameters())
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
{getattr(adapter.config, "example_call", "model(..., memory=memory)")}
```

Written by mmattn {config["mmattn_version"]}.
"""
