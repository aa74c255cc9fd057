"""Adapters follow the host's `.to()` and `.train()`, stay out of its `state_dict`, and `unload()` removes them."""

from __future__ import annotations

import copy
import sys
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import Site
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.interop.peft import has_peft, host_attribute, inner_host, watch_peft
from mmattn.hosts.interop.quantised import keep_stored, let_change
from mmattn.hosts.interop.sharded import reshard
from mmattn.hosts.probe import Handle
from mmattn.hosts.recomputation import forget_context
from mmattn.hosts.replaced import replace_method, restore_methods

#: Attribute of a host that leads to its adapted model.
MARK = "_mmattn"


class AttachedModel(nn.Module):
    """A host and the adapters beside it. Whatever is not found here is looked up on the host.

    The host keeps its own modules, hooks apart: `host.state_dict()`, `save_pretrained` and every tool that walks the
    host see it as it was. `.to()`, `.half()`, `.train()` and `.eval()` on either object reach both.
    """

    kind: ClassVar[str] = ""
    positions: ClassVar[tuple[str, ...]] = ("after", "before")
    # Methods of the host that are replaced on it while adapters are attached, by name.
    replaced: tuple[str, ...] = ()

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        watch_peft(AttachedModel)
        self.training = host.training
        self.host = host
        self.adapters = nn.ModuleDict().train(host.training)
        # nn.Module finds sub-modules by `__getattr__`, which each call would go through several times.
        self.__dict__.update(host=host, adapters=self.adapters)
        self._hooks: list[Handle] = []
        self._frozen: list[nn.Parameter] = []
        self._stored: list[nn.Module] = []

    @abstractmethod
    def sites(self, position: str) -> list[Site]:
        """Return every site of this position, in the order of the layers."""

    def adapter(self, name: str) -> AdapterLayers:
        """Return the trainable part of the adapter of this name."""
        adapters: Any = self._modules["adapters"]
        layers: AdapterLayers | None = adapters._modules.get(name)
        if layers is None:
            raise AttachError(f"no adapter {name!r} is attached; there are: {', '.join(adapters) or 'none'}")
        return layers

    def train(self, mode: bool = True) -> AttachedModel:
        """Set training mode of host and adapters."""
        self.host.train(mode)
        self.training = mode
        return self

    def _host_train(self, mode: bool = True) -> nn.Module:
        type(self.host).train(self.host, mode)
        self.adapters.train(mode)
        self.training = mode
        return self.host

    def _apply(self, fn: Any, recurse: bool = True) -> AttachedModel:
        self.host._apply(fn, recurse)
        return self

    def _host_apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        type(self.host)._apply(self.host, fn, recurse)
        self.adapters._apply(fn, recurse)
        return self.host

    def join(self) -> None:
        """Freeze the host, and follow it where it is moved."""
        self._stored = keep_stored(self.host)
        reshard(self.host)
        if not has_peft(self.host):
            # What peft froze is its own to unfreeze.
            self._frozen = [parameter for parameter in self.host.parameters() if parameter.requires_grad]
            for parameter in self._frozen:
                parameter.requires_grad_(False)
        replace_method(self.host, "_apply", self._host_apply)
        replace_method(self.host, "train", self._host_train)
        self.host.__dict__[MARK] = self

    def unload(self) -> nn.Module:
        """Give back the very same host with no trace of the adapters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        restore_methods(self.host, "_apply", "train", MARK, *self.replaced)
        if self._frozen and not has_peft(self.host):
            # Since peft came on, what is trained of the host is for peft to say.
            for parameter in self._frozen:
                parameter.requires_grad_(True)
        self._frozen = []
        let_change(self._stored)
        self._stored = []
        forget_context(self.host)
        forget_compiled()
        return self.host

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "host":
                raise
            host: Any = super().__getattr__("host")
            return host_attribute(host, name)

    def _get_name(self) -> str:
        # By this name a Trainer of transformers knows whose labels are to be shifted.
        return type(inner_host(self.host)).__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> AttachedModel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a host with adapters cannot be pickled: use save_adapter(path) for the adapter, save_pretrained for the "
            "host, and mmattn.load(host, path)"
        )


def adapted(host: nn.Module) -> Any:
    """Return the adapted model of a host that has adapters, or None."""
    return host.__dict__.get(MARK)


def forget_compiled() -> None:
    """Have compiled code traced again, which does not notice hooks that come or go."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def check_host(host: object) -> nn.Module:
    """Refuse hosts that are no modules, compiled, or without weights."""
    if not isinstance(host, nn.Module):
        raise AttachError(f"attach needs a model, got {type(host).__name__}")
    if hasattr(host, "_orig_mod") or getattr(host, "_compiled_call_impl", None) is not None:
        raise ConditionError("the host is compiled and would ignore the adapters: attach first, then compile")
    empty = [name for name, parameter in host.named_parameters() if parameter.device.type == "meta"]
    # Hooks of accelerate bring offloaded weights in when a layer is called.
    offloaded = hasattr(host, "hf_device_map") or any(hasattr(part, "_hf_hook") for part in host.modules())
    if empty and not offloaded:
        raise ConditionError(
            f"{len(empty)} weights of {type(host).__name__} are on the meta device ({empty[0]}, …): load weights first"
        )
    return host
