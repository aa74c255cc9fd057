"""`HostState`: with what a host computes, beside its inputs; every cache of its results compares it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property, lru_cache
from importlib.metadata import version

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import device_of
from mmattn.storage.safetensors import fingerprint
from mmattn.storage.tensor_cache import ModuleVersion, TensorVersion, autocast_dtype

#: Attributes of modules and entries of configs on which no hidden state depends.
_INERT = {
    *("training", "gradient_checkpointing", "name_or_path", "transformers_version", "architectures", "dtype"),
    *("torch_dtype", "use_cache", "return_dict", "output_hidden_states", "output_attentions", "_is_full_backward_hook"),
    *("warnings_issued", "model_tags", "accepts_loss_kwargs", "loss_type", "hf_device_map"),  # by trainers and loaders
}
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class HostState:
    """Weights, buffers, settings, config, LoRA adapters with their scales, and autocast of a host at one moment.

    An edit of a weight through `tensor.data` goes unnoticed by `holds`, as in `TensorVersion`; a `HostState` that is
    made after it has another `digest`.

    Args:
        host: the model.
        modules: its modules by name on which the results depend; all by default.

    >>> host = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    >>> state = HostState(host)
    >>> host[1].eps = 1e-3
    >>> state.holds(), HostState(host).holds()
    (False, True)
    """

    def __init__(self, host: nn.Module, modules: Mapping[str, nn.Module] | None = None) -> None:
        self._parts = dict(host.named_modules()) if modules is None else dict(modules)
        # Weights that accelerate has offloaded are new tensors after every call, from a file that does not change.
        resident = [part for part in self._parts.values() if not getattr(_hook(part), "offload", False)]
        self._tensors = [tensor for part in resident for tensor in _tensors(part).values()]
        self._modules, self._version = ModuleVersion(resident), TensorVersion(self._tensors)
        owners = {f"module {name}": part for name, part in self._parts.items()}
        owners |= {f"config {number}": config for number, config in enumerate(_configs(host))}
        self._settings = {name: (owner, _settings(owner)) for name, owner in owners.items()}
        #: Attributes that only the class of an owner has: set on the object itself, they count.
        self._unset = [(vars(owner), _class_settings(type(owner)) - vars(owner).keys()) for owner in owners.values()]  # type: ignore[arg-type]
        self._device = device_of(host)
        self._autocast = autocast_dtype(self._device)

    def holds(self) -> bool:
        """Return whether the host computes as it did."""
        return (
            self._autocast == autocast_dtype(self._device)
            and self._modules.holds()
            and self._version.holds(self._tensors)
            and all(settings.items() <= vars(owner).items() for owner, settings in self._settings.values())
            and all(names.isdisjoint(attributes) for attributes, names in self._unset)
        )

    @cached_property
    def digest(self) -> str:
        """A sha256 of all that results depend on, but for rounding; equal on any machine."""
        digest = hashlib.sha256(f"autocast {self._autocast}\n".encode())
        for name, part in self._parts.items():  # one offloaded module in memory
            digest.update(f"{name} {type(part).__qualname__} {fingerprint(_tensors(part))}\n".encode())
        settings = {name: settings for name, (_, settings) in self._settings.items()}
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    @property
    def digest_here(self) -> str:
        """The digest with what rounding depends on: the kind of device, the versions of torch and transformers."""
        return f"{self.digest} {self._device.type} {torch.__version__} {version('transformers')}"


def _hook(part: nn.Module) -> object:
    return getattr(part, "_hf_hook", None)


def _tensors(part: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers of a module itself; offloaded ones are loaded."""
    tensors: dict[str, object] = {}
    # Scales of quantised weights are neither parameters nor buffers, but part of the state dict.
    part._save_to_state_dict(tensors, "", keep_vars=True)
    tensors |= dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
    values = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    offloaded: Mapping[str, Tensor] | None = getattr(_hook(part), "weights_map", None)
    return {name: offloaded[name] if value.is_meta and offloaded else value for name, value in values.items()}


def _configs(host: nn.Module) -> list[object]:
    """Return the configs of a host and of its parts, each once, in their order."""
    configs = [getattr(part, "config", None) for part in host.modules()]
    configs += [inner for config in configs if hasattr(config, "to_dict") for inner in vars(config).values()]
    return list({id(config): config for config in configs if hasattr(config, "to_dict")}.values())


def _settings(owner: object) -> dict[str, object]:
    """Return the plain attributes of a module or config."""
    return {
        name: deepcopy(value) for name, value in vars(owner).items() if _counts(type(owner), name) and _is_plain(value)
    }


@lru_cache(None)
def _class_settings(kind: type) -> frozenset[str]:
    """Return the names of the plain attributes of a class and its bases."""
    values = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return frozenset(name for name, value in values.items() if _counts(kind, name) and _is_plain(value))


def _counts(kind: type, name: str) -> bool:
    """Return whether results may depend on an attribute; those of peft, such as the active LoRA, are private ones."""
    private = kind.__module__.startswith("peft.") and name[:2] != "__"
    return (private or name[0] != "_") and name not in _INERT and not name.endswith("_token_id")


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)
