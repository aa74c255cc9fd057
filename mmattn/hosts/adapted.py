"""The verbs shared by all hosts: adapters by name, memory by call, files, and going away without a trace."""

from __future__ import annotations

import contextlib
import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.chunked import ChunkedLayers
from mmattn.adapters.composed import ComposedLayers
from mmattn.errors import AttachError, ConditionError, ShapeError
from mmattn.hosts import calls
from mmattn.hosts.augmenting import AugmentingModel
from mmattn.hosts.calls import Call, Prepared
from mmattn.hosts.interop.quantised import keep_stored, let_change, size_of
from mmattn.hosts.interop.sharded import reshard
from mmattn.hosts.neighbours import Found, Retrieve
from mmattn.memory import Memory

if TYPE_CHECKING:
    from mmattn.inspect.doctor import Report

OneMemory = Memory | Prepared | Tensor | Retrieve | Found | AugmentingModel
Memories = OneMemory | Mapping[str, OneMemory]


class AdaptedModel(nn.Module, ABC):
    """A host and its adapters. Whatever is not found here is looked up on the host.

    The host keeps its own modules, hooks apart: `host.state_dict()`, `save_pretrained` and every tool that walks the
    host see it as it was. `.to()`, `.half()`, `.train()` and `.eval()` on either object reach both.
    """

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__()
        self.training = host.training
        self.host = host
        self.adapters = nn.ModuleDict().train(host.training)
        self.require_memory = require_memory
        self.active: list[str] = []
        self._key = object()
        self._hooks: list[Any] = []
        self._frozen: list[nn.Parameter] = []
        self._stored: list[nn.Module] = []

    # Adapters ------------------------------------------------------------------------------------------------------

    def set_adapter(self, names: str | Sequence[str]) -> None:
        """Make these adapters, in this order, the active ones; an empty list is none.

        Raises:
            AttachError: a name that is not attached.
        """
        picked = [names] if isinstance(names, str) else list(names)
        for name in picked:
            self._adapter(name)
        self.active = picked

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter and its weights; the last one goes with `detach`."""
        self._adapter(name)
        if len(self.adapters) == 1:
            raise AttachError(f"{name!r} is the only adapter: use detach()")
        del self.adapters[name]
        self.active = [other for other in self.active if other != name]
        self._refresh_hooks()

    @abstractmethod
    def add_adapter(self, name: str, adapter: Any) -> None:
        """Put another adapter on the host, active beside those that are."""

    def add_weighted_adapter(self, names: Sequence[str], weights: Sequence[float], name: str) -> None:
        """Merge adapters of equal settings into a new one, whose weights are the weighted sum of theirs.

        It is not active: `set_adapter(name)` uses it instead of the others.

        Raises:
            AttachError: an adapter that is not attached, a name that is taken, or settings that differ.
            ConfigError: another number of weights than adapters.
        """
        from mmattn.hosts.merging import add_weighted

        add_weighted(self, names, weights, name)

    def _check_new(self, name: str) -> None:
        if self.adapters:
            self._check_reachable()
        if name in self.adapters:
            raise AttachError(f"an adapter {name!r} is already attached; pick another name or delete_adapter({name!r})")
        if not isinstance(name, str) or not name or "." in name:
            raise AttachError(f"an adapter's name must be a string without dots, got {name!r}")

    def _adapter(self, name: str) -> AdapterLayers:
        if name not in self.adapters:
            raise AttachError(f"no adapter {name!r} is attached; there are: {', '.join(self.adapters) or 'none'}")
        adapter = self.adapters[name]
        assert isinstance(adapter, AdapterLayers)
        return adapter

    def trainable_parameters(self) -> tuple[int, int]:
        """Numbers of trained parameters and of all, host included."""
        counts = [(size_of(p), p.requires_grad) for p in self.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    def print_trainable_parameters(self) -> None:
        """Print the numbers in the words of peft."""
        trained, total = self.trainable_parameters()
        print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}")

    # Memory --------------------------------------------------------------------------------------------------------

    def prepare(self, memory: Memories) -> Prepared | Found | dict[str, Prepared | Found]:
        """Check a memory and keep what the adapters make of it, for many calls; give the result as `memory`."""
        prepared = self._prepare(memory)
        if any(isinstance(one, AugmentingModel) for one in prepared.values()):
            raise ConditionError("what an augmenting model reads belongs to a call: give it to each call as memory=")
        if not prepared:
            raise ConditionError("no adapter is active to prepare a memory for: set_adapter(name) first")
        return prepared if isinstance(memory, Mapping) else next(iter(prepared.values()))

    @contextlib.contextmanager
    def disabled(self, names: str | Sequence[str] | None = None) -> Iterator[AdaptedModel]:
        """Inside the block, in this thread, these adapters (all by default) do not exist."""
        off = set(self.adapters) if names is None else {names} if isinstance(names, str) else set(names)
        for name in off:
            self._adapter(name)
        call = None if off == set(self.adapters) else self._current()
        with calls.entered(self._key, call), calls.without(self._key, off):
            yield self

    def _check_reachable(self) -> None:
        if find_adapted(self.host) is not self:
            raise ConditionError("this handle was detached from its host and reaches it no longer: attach again")

    def _check_not_needed(self) -> None:
        if self.require_memory:
            raise ConditionError("this host was attached with require_memory=True and no memory was given")

    def _current(self) -> Call | None:
        found, call = calls.current(self._key)
        if not found and self.require_memory:
            raise ConditionError(
                "this host was attached with require_memory=True and was called without: give memory= or use "
                "condition(memory); a new thread does not inherit the block it was started in"
            )
        return call

    def _prepare(self, memory: Memories) -> dict[str, Any]:
        given = dict(memory) if isinstance(memory, Mapping) else dict.fromkeys(self.active, memory)
        shared: dict[int, Any] = {}
        out = {}
        for name, one in given.items():
            adapter = self._adapter(name)
            if isinstance(adapter, ChunkedLayers) and (isinstance(one, Found) or callable(one)):
                out[name] = one if isinstance(one, Found) else shared.setdefault(id(one), Found(one))
                continue
            if isinstance(adapter, ComposedLayers) and isinstance(one, AugmentingModel):
                one.check(name, adapter, self.host)
                out[name] = one
                continue
            if isinstance(adapter, ComposedLayers) or isinstance(one, AugmentingModel):
                raise ShapeError(
                    f"adapter {name!r} is of kind {adapter.config.kind!r} and got {type(one).__name__}: a composed "
                    "adapter, and no other, takes mmattn.AugmentingModel(lm)"
                )
            if isinstance(one, Tensor):
                one = shared[id(one)].memory if id(one) in shared else Memory(one)
            if not isinstance(one, (Memory, Prepared)):
                hint = "; a function that finds neighbours is for a ChunkedAdapter" if callable(one) else ""
                raise ShapeError(f"memory must be a Memory or a tensor (b, m, e), got {type(one).__name__}{hint}")
            inner = one.memory if isinstance(one, Prepared) else one
            adapter.check_memory(name, inner)
            if isinstance(one, Memory) and one.finite_checked and not torch.compiler.is_compiling():
                one.check_finite()
            out[name] = one if isinstance(one, Prepared) else shared.setdefault(id(one), Prepared(one))
        return out

    # Files -------------------------------------------------------------------------------------------------------

    def save_adapter(self, path: str | PathLike[str], name: str = "default", *, encoder: str | None = None) -> None:
        """Write one adapter as a folder: `adapter_config.json`, `adapter_model.safetensors`, `README.md`.

        Args:
            encoder: fingerprint of the encoder whose memories it was trained on, kept in the file.
        """
        from mmattn.hosts.adapter_files import save

        save(self, path, name, encoder)

    def push_to_hub(
        self,
        repository: str,
        name: str = "default",
        *,
        encoder: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload one adapter, and nothing of the host, to a repository "org/name" of the Hugging Face hub.

        Args:
            name, encoder: as in `save_adapter`.
            private, revision, token, commit_message: as in `transformers.PreTrainedModel.push_to_hub`; the revision is
                a branch, made where it is missing.

        Returns:
            the address of the commit.

        Raises:
            AdapterFileError: the hub refused it, or cannot be reached.
        """
        from mmattn.hosts.interop.hub import push

        return push(
            self, repository, name, encoder=encoder, private=private, revision=revision, token=token,
            message=commit_message,
        )  # fmt: skip

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Everything that attends to a memory: by adapter and host layer, what `inspect` listens to."""
        named = ((name, self._adapter(name)) for name in self.adapters)
        return {(name, layer): adapter.attention(layer) for name, adapter in named for layer in adapter.layers}

    @abstractmethod
    def place(self, index: int) -> nn.Module:
        """The host's layer of this number, at which adapters act."""

    def doctor(self, batch: Mapping[str, Any]) -> Report:
        """Examine the active adapters on a batch: does memory arrive, is what must not be seen unseen, is all alive.

        The model is called some twenty times and is afterwards as it was.

        Args:
            batch: what the model takes, by name, `memory` with it; two rows or more tell most.

        Raises:
            ConfigError: no batch with a memory. ConditionError: no adapter is active, or the batch has a cache.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import mmattn
        >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                                   num_attention_heads=4))
        >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
        >>> report = model.doctor(dict(input_ids=torch.tensor([[5, 6, 7], [8, 9, 1]]), memory=torch.randn(2, 11, 24)))
        >>> report.ok, report.failed  # fresh
        (False, ['gates', 'each layer adds something', 'another memory'])
        """
        from mmattn.inspect.doctor import examine

        return examine(self, batch)

    # Being together ------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> AdaptedModel:
        """Set training mode of host and adapters."""
        self.host.train(mode)
        self.training = mode
        return self

    def _host_train(self, mode: bool = True) -> nn.Module:
        type(self.host).train(self.host, mode)
        self.adapters.train(mode)
        self.training = mode
        return self.host

    def _apply(self, fn: Any, recurse: bool = True) -> AdaptedModel:
        self.host._apply(fn, recurse)
        return self

    def _host_apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        type(self.host)._apply(self.host, fn, recurse)
        self.adapters._apply(fn, recurse)
        return self.host

    def _join(self) -> None:
        """Freeze the host and listen to what moves it."""
        self._stored = keep_stored(self.host)
        reshard(self.host)
        parameters = list(self.host.parameters())
        # peft froze all but its own, which are its owner's to train.
        if getattr(self.host, "peft_config", None) is None:
            self._frozen = [parameter for parameter in parameters if parameter.requires_grad]
            for parameter in self._frozen:
                parameter.requires_grad_(False)
        self.host.__dict__.update(_apply=self._host_apply, train=self._host_train, _mmattn=self)

    @abstractmethod
    def _refresh_hooks(self) -> None:
        """Listen at exactly the places where the adapters of this moment act."""

    def detach(self) -> nn.Module:
        """Give back the very same host with no trace of the adapters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name in ("_apply", "train", "generate", "_mmattn"):
            self.host.__dict__.pop(name, None)
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
        let_change(self._stored)
        self._stored = []
        forget_compiled()
        return self.host

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "host":
                raise
            return getattr(super().__getattr__("host"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptedModel:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a host with adapters cannot be pickled: save the adapter with save_adapter(path), the host with "
            "save_pretrained, and join them again with mmattn.load(host, path)"
        )


def find_adapted(host: nn.Module) -> AdaptedModel | None:
    """The handle of a host that has adapters, or None."""
    return host.__dict__.get("_mmattn")


def forget_compiled() -> None:
    """Compiled code does not notice hooks that come or go later: have it traced again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def check_host(host: object) -> nn.Module:
    """Refuse what cannot be joined.

    Raises:
        AttachError: not a module. ConditionError: compiled, or weights not loaded.
    """
    if not isinstance(host, nn.Module):
        raise AttachError(f"attach needs a model, got {type(host).__name__}")
    if hasattr(host, "_orig_mod") or getattr(host, "_compiled_call_impl", None) is not None:
        raise ConditionError("the host is compiled and would ignore the adapters: attach first, then compile")
    empty = [name for name, parameter in host.named_parameters() if parameter.device.type == "meta"]
    if empty and not hasattr(host, "hf_device_map"):
        raise ConditionError(
            f"{len(empty)} weights of {type(host).__name__} are on the meta device ({empty[0]}, …): load weights first"
        )
    return host
