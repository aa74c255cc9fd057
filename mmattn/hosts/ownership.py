"""A host and its adapters by name: they follow its `.to()` and `.train()`, stay out of its `state_dict`, and unload."""

from __future__ import annotations

import contextlib
import copy
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.files import check_name
from mmattn.adapters.protocols import AdapterConfig, Site
from mmattn.adapters.settings import is_adapter, kinds_at
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.context import Handle, OpenBlocks
from mmattn.hosts.interop.peft import has_peft, host_attribute, inner_host, watch_peft
from mmattn.hosts.interop.quantised import keep_stored, let_change, size_of
from mmattn.hosts.interop.sharded import reshard
from mmattn.hosts.recomputation import forget_context
from mmattn.hosts.replaced import replace_method, restore_methods

#: Attribute of a host that leads to its adapted model.
MARK = "_mmattn"


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


class AttachedModel(nn.Module):
    """A host and the adapters beside it. Whatever is not found here is looked up, set and deleted on the host.

    The host keeps its own modules, hooks apart: `host.state_dict()`, `save_pretrained` and every tool that walks the
    host see it as it was. `.to()`, `.half()`, `.train()` and `.eval()` on either object reach both.
    """

    kind: ClassVar[str] = ""
    positions: ClassVar[tuple[str, ...]] = ("after", "before")
    # Methods of the host that are replaced on it while adapters are attached, by name.
    replaced: tuple[str, ...] = ()

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        check_host(host)
        watch_peft(AttachedModel)
        self.training = host.training
        self.host = host
        self.adapters = nn.ModuleDict().train(host.training)
        # nn.Module finds sub-modules by `__getattr__`, which each call would go through several times.
        self.__dict__.update(host=host, adapters=self.adapters)
        self.active: list[str] = []
        self.open_blocks = OpenBlocks()
        self._hooks: list[Handle] = []
        self._frozen: list[nn.Parameter] = []
        self._stored: list[nn.Module] = []

    @abstractmethod
    def sites(self, position: str) -> list[Site]:
        """Return every site of this position, in the order of the layers."""

    @abstractmethod
    def refresh_hooks(self) -> None:
        """Hook exactly the sites of the present adapters."""

    def check_adapter(self, adapter: AdapterLayers) -> None:
        """Check that changes at the sites of an adapter reach the output of the host."""

    @abstractmethod
    def check_attached(self) -> None:
        """Refuse to act on a host from which these adapters were unloaded."""

    # Being with the host --------------------------------------------------------------------------------------------

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AttachedModel:
        self.host._apply(fn, recurse)
        return self

    def _host_apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
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
            return host_attribute(self.host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_hf_hook":
            self._check_hook(value)
        owner = self._owner(name)
        if owner is None:
            super().__setattr__(name, value)
        else:
            setattr(owner, name, value)

    def __delattr__(self, name: str) -> None:
        owner = self._owner(name)
        if owner is None:
            super().__delattr__(name)
        else:
            delattr(owner, name)

    def _owner(self, name: str) -> nn.Module | None:
        """Return the module of the host at which a read of a public attribute ends; None where it ends here."""
        host: nn.Module | None = vars(self).get("host")
        # While this object is made, and with the marks of other libraries, what is set is set here.
        if host is None or name.startswith("_") or vars(host).get(MARK) is not self or _holds(self, name):
            return None
        return next((part for part in (host, inner_host(host)) if _holds(part, name)), None)

    def _check_hook(self, hook: object) -> None:
        """Refuse to be offloaded by accelerate, which looks weights up in `state_dict()`; set before any is moved."""
        if any(hasattr(one, "weights_map") for one in getattr(hook, "hooks", (hook,))):
            self.__dict__.pop("_old_forward", None)
            raise ConditionError(
                "accelerate looks weights up in state_dict(), where an adapted model has no frozen ones: give "
                "model.host to cpu_offload, disk_offload or dispatch_model"
            )

    def _get_name(self) -> str:
        # By this name a Trainer of transformers knows whose labels are to be shifted.
        return type(inner_host(self.host)).__name__

    def __deepcopy__(self, memo: dict[int, object]) -> AttachedModel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        # torch copies no handle of a hook whose module is gone, such as a projection that was replaced.
        hooks = [hook for hook in self._hooks if getattr(hook, "hooks_dict_ref", lambda: self)() is not None]
        state = self.__dict__ | {"_hooks": hooks}
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in state.items()})
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a host with adapters cannot be pickled: use save_adapter(path) for the adapter, save_pretrained for the "
            "host, and mmattn.load(host, path)"
        )

    # Adapters by name -----------------------------------------------------------------------------------------------

    def adapter(self, name: str) -> AdapterLayers:
        """Return the trainable part of the adapter of this name."""
        layers: AdapterLayers | None = self.adapters._modules.get(name)  # type: ignore[assignment]
        if layers is None:
            raise AttachError(f"no adapter {name!r} is attached; there are: {', '.join(self.adapters) or 'none'}")
        return layers

    def set_adapter(self, names: str | Sequence[str]) -> None:
        """Make these adapters, in this order, the active ones; an empty list is none.

        Raises:
            AttachError: a name that is not attached.
            ConditionError: inside a block that gives a memory.
        """
        selected = [names] if isinstance(names, str) else list(names)
        for name in selected:
            self.adapter(name)
        self._check_no_block("set_adapter")
        self.active = selected

    @outside_modes()
    def add_adapter(self, name: str, adapter: AdapterConfig | None = None) -> None:
        """Put another adapter on the host, active beside those that are.

        Args:
            name: to switch, combine and save it by.
            adapter: its settings.

        Raises:
            AttachError: the name is taken or no plain name, or the adapter is not for this kind of host.
            ConditionError: memory cannot reach its layers, the adapters were unloaded, or weights are made on the meta
                device here.
        """
        if not isinstance(name, str):
            raise AttachError(
                f"add_adapter(name, settings) got {type(name).__name__} as the name; a LoRA is put on by "
                "model.host.add_adapter or peft"
            )
        if self.adapters:
            self.check_attached()
        check_name(name)
        if name in self.adapters:
            raise AttachError(
                f"an adapter {name!r} is already attached: choose another name or delete_adapter({name!r})"
            )
        if adapter is None or not (is_adapter(adapter) and set(adapter.positions) & set(self.positions)):
            raise AttachError(
                f"{type(self.host).__name__} is a host of kind {self.kind!r} and takes {kinds_at(self.positions)}; got "
                f"{type(adapter).__name__}"
            )
        built = adapter.build(adapter.sites(self))
        if not isinstance(built, AdapterLayers):
            raise AttachError(
                f"{type(adapter).__name__}.build must return an AdapterLayers, got {type(built).__name__}: subclass "
                "mmattn.adapters.base.AdapterLayers"
            )
        if any(one.is_meta for one in (*built.parameters(), *built.buffers())):
            raise ConditionError(
                f"the weights of the adapter {name!r} were made on the meta device, without values: attach and load "
                "outside of init_empty_weights()"
            )
        if torch.get_default_dtype().itemsize < 4:
            built.float()
        built.name = name
        built.attach_to(self)
        built.initialise(self)
        # A block lives where the states that it changes are: with a device map, on several devices.
        built.to_sites()
        built.train(self.host.training)
        self.adapters[name] = built
        self.active.append(name)
        self.refresh_hooks()

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter and its weights; the last one goes with `unload`.

        Raises:
            AttachError: it is not attached, or the only one.
            ConditionError: inside a block that gives a memory.
        """
        self.adapter(name)
        self._check_no_block("delete_adapter")
        if len(self.adapters) == 1:
            raise AttachError(f"{name!r} is the only adapter: use unload()")
        del self.adapters[name]
        self.active = [other for other in self.active if other != name]
        self.refresh_hooks()

    def _check_no_block(self, verb: str) -> None:
        """Refuse to change the adapters whose memory a block of this context holds."""
        if self.open_blocks.in_force().call is not None:
            raise ConditionError(
                f"{verb} inside a condition block, whose memory is for the adapters that were active where it began: "
                "leave the block first, or use disable_adapter()"
            )

    def trainable_parameters(self) -> tuple[int, int]:
        """Numbers of trained parameters and of all, host included."""
        counts = [(size_of(p), p.requires_grad) for p in self.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    def print_trainable_parameters(self) -> None:
        """Print the numbers in the words of peft."""
        trained, total = self.trainable_parameters()
        print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}")


def _holds(module: nn.Module, name: str) -> bool:
    """Return whether a module or its class has an attribute, and not only `__getattr__` of it."""
    fields = vars(module)
    registered = (fields[kind] for kind in ("_parameters", "_buffers", "_modules"))
    return name in fields or hasattr(type(module), name) or any(name in one for one in registered)


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
