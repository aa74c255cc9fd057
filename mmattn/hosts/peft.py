"""peft on the same host: what it trains, and the object that it must be put on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from mmattn.errors import AttachError

#: Methods of peft, transformers and diffusers for adapters of peft, and ours for adapters of mmattn.
FORWARDED_METHODS = {
    "load_adapter": "mmattn.load(model, folder, name)",
    "active_adapter": "model.active",
    "active_adapters": "model.active",
    "set_adapters": "model.set_adapter(names)",
    "enable_adapters": "model.set_adapter(names)",
    "disable_adapters": "with model.disable_adapter(): …, or model.set_adapter([])",
    "delete_adapters": "model.delete_adapter(name)",
    "get_adapter_state_dict": "model.state_dict()",
    "enable_peft_hotswap": "model.adapter(name).load_state_dict(…)",
    "enable_lora_hotswap": "model.adapter(name).load_state_dict(…)",
}

_WATCHING: list[RemovableHandle] = []
#: Models of peft directly around a host: those with prompts, which leave no mark on it. LoRA wraps it in a tuner.
_AROUND: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def host_attribute(host: nn.Module, name: str) -> Any:
    """Return an attribute of the host; methods for adapters of peft raise AttachError when they are called."""
    value = getattr(host, name)
    if name not in FORWARDED_METHODS:
        return value

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AttachError(
            f"{name} of {type(host).__name__} is for adapters of peft: use {FORWARDED_METHODS[name]}, or "
            f"model.host.{name} for a LoRA"
        )

    return refuse if callable(value) else refuse()


def watch_peft(adapted_class: type[nn.Module]) -> None:
    """Refuse adapted models where peft wraps a model, and note models with prompts around hosts, once peft is imported.

    transformers registers modules in each forward (slices of its layers), so processes without peft have no hook.
    """
    if _WATCHING or "peft" not in sys.modules:
        return

    def on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or not type(parent).__module__.startswith("peft."):
            return
        if isinstance(child, adapted_class):
            raise AttachError(
                "peft was put on the adapted model and would freeze its adapters: call "
                "get_peft_model(model.host, config), before or after attach"
            )
        if name == "base_model" and not _is_of_peft(type(child)):
            _AROUND[child] = ref(parent)

    _WATCHING.append(register_module_module_registration_hook(on_registration))


def has_peft(host: nn.Module) -> bool:
    """Return whether peft has put layers into a host or prompts before it, and so decides what is trained."""
    around = _AROUND.get(host)
    return any(_is_of_peft(type(part)) for part in host.modules()) or (around is not None and around() is not None)


def inner_host(host: nn.Module) -> nn.Module:
    """Return the model that peft has wrapped, or the host itself."""
    base: Callable[[], nn.Module] | None = getattr(host, "get_base_model", None)
    return host if base is None else base()


def _is_of_peft(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "peft"
