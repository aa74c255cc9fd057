"""The changes that `attach` makes to a host and `unload` undoes: frozen parameters, replaced methods, hooks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn

from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.context import Handle, forget_context
from mmattn.hosts.peft import has_peft
from mmattn.hosts.stored import keep_stored, let_change, reshard

#: Attribute of a host that leads to its adapted model.
MARK = "_mmattn"


class Attachment:
    """The changes of one host while adapters are attached to it.

    The host keeps its own modules, hooks apart: `host.state_dict()`, `save_pretrained` and every tool that walks the
    host see it as it was.
    """

    def __init__(self, host: nn.Module) -> None:
        self.host = host
        self.hooks: list[Handle] = []
        self._replaced: list[tuple[nn.Module, str]] = []
        self._frozen: list[nn.Parameter] = []
        self._stored: list[nn.Module] = []

    def freeze(self) -> None:
        """Freeze the parameters of the host, and keep them as they are stored."""
        self._stored = keep_stored(self.host)
        reshard(self.host)
        if not has_peft(self.host):
            # What peft froze is its own to unfreeze.
            self._frozen = [parameter for parameter in self.host.parameters() if parameter.requires_grad]
            for parameter in self._frozen:
                parameter.requires_grad_(False)

    def replace(self, owner: nn.Module, name: str, value: object) -> None:
        """Put an attribute on the host or on the model that peft has wrapped, in place of that of its class."""
        vars(owner)[name] = value
        self._replaced.append((owner, name))

    def leave(self) -> None:
        """Undo every change."""
        self.remove_hooks()
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced = []
        if self._frozen and not has_peft(self.host):
            # Since peft came on, what is trained of the host is for peft to say.
            for parameter in self._frozen:
                parameter.requires_grad_(True)
        self._frozen = []
        let_change(self._stored)
        self._stored = []
        forget_context(self.host)

    def remove_hooks(self) -> None:
        """Remove every hook."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        forget_compiled()

    def forget_lost_hooks(self) -> None:
        """Forget hooks whose module is gone, such as a projection that was replaced: torch copies no such handle."""
        self.hooks = [hook for hook in self.hooks if getattr(hook, "hooks_dict_ref", lambda: self)() is not None]


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Make and measure tensors as outside of `torch.inference_mode`, autocast and a default device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.device("cpu"))
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield


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
