"""peft on the same host: which parameters are its own to train, and on which object it must be put."""

from __future__ import annotations

import gc
import sys
from functools import partial
from types import FrameType
from typing import Any

from torch import nn

from mmattn.errors import AttachError

#: Verbs of peft, transformers and diffusers for the adapters of peft in a host, and what does the same for ours.
VERBS = {
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


def of_host(host: nn.Module, name: str) -> Any:
    """What an adapted model has of its host under a name; a verb for adapters of peft is refused where it is called.

    Args:
        host: the frozen model.
        name: of the attribute.

    Raises:
        AttachError: it tells of adapters of peft.
    """
    value = getattr(host, name)
    if name not in VERBS:
        return value
    return partial(_refuse_verb, host, name) if callable(value) else _refuse_verb(host, name)


def _refuse_verb(host: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    raise AttachError(
        f"{name} of {type(host).__name__} is for adapters of peft in the host, and these are of mmattn: use "
        f"{VERBS[name]}, or model.host.{name} where a LoRA is meant"
    )


def has_peft(host: nn.Module) -> bool:
    """Whether peft has put layers into a host or prompts before it, so that it says what is trained."""
    return any(_is_of_peft(type(part).__module__) for part in host.modules()) or _has_prompts(host)


def inner_host(host: nn.Module) -> nn.Module:
    """The model that peft has wrapped, or the host itself."""
    base: Any = getattr(host, "get_base_model", None)
    return host if base is None else base()


def active_lora(host: nn.Module) -> tuple[Any, ...]:
    """Which LoRA adapters of peft change what a host computes."""
    return tuple(
        (name, tuple(getattr(part, "active_adapters", ())), bool(getattr(part, "disable_adapters", False)))
        for name, part in host.named_modules()
        if hasattr(part, "active_adapters") and hasattr(part, "base_layer")
    )


def refuse_peft(caller: FrameType) -> None:
    """Refuse to be looked at by peft, which would freeze the adapters or put its layers into them.

    Args:
        caller: the frame that asks.

    Raises:
        AttachError: it is a function of peft.
    """
    if _is_of_peft(caller.f_globals.get("__name__", "")):
        raise AttachError(
            "peft was given the adapted model and would freeze its adapters: give it the host, "
            "get_peft_model(model.host, config), before or after attach; or attach to the model that peft returns"
        )


def _has_prompts(host: nn.Module) -> bool:
    # Looking through all objects of the process takes a tenth of a second; peft freezes the host that it gives prompts.
    if "peft" not in sys.modules or all(parameter.requires_grad for parameter in host.parameters()):
        return False
    return any(
        # Prompts leave no mark on the host: only the model around it knows of them.
        isinstance(one, dict) and one.get("base_model") is host and "prompt_encoder" in one
        for one in gc.get_referrers(host)
    )


def _is_of_peft(module: str) -> bool:
    return module.partition(".")[0] == "peft"
