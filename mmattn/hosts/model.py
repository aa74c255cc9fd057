"""`AdaptedModel`: a frozen host with adapters beside it, each with a name, and a memory for each call or block."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from typing_extensions import Self, Unpack

from mmattn.adapters import memory_types  # noqa: F401  (it registers them)
from mmattn.adapters.base import AdapterLayers, build_layers, is_adapter, kinds_at
from mmattn.adapters.files import check_name
from mmattn.adapters.protocols import BoundMemory, Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import TextState
from mmattn.errors import AdapterFileError, AttachError, ConditionError, ConfigError, check_float
from mmattn.hosts.attachment import MARK, Attachment, check_host, outside_modes
from mmattn.hosts.calibration import calibrating, fresh_adapters
from mmattn.hosts.context import (
    Action,
    Arguments,
    Call,
    ForwardStep,
    Handle,
    Keywords,
    OpenBlocks,
    Positional,
    check_not_required,
    prepared_for_graphs,
)
from mmattn.hosts.hooks import CrossAttentionHook, HostHooks, leave_uncompiled
from mmattn.hosts.keywords import check_keywords, keywords_of, shown_signature
from mmattn.hosts.peft import host_attribute, inner_host, watch_peft
from mmattn.hosts.saving import (
    DEFAULT,
    SETTINGS,
    HubOptions,
    adapter_config,
    is_registered,
    keep_trained,
    trained_names,
    upload,
    write_adapter,
)
from mmattn.hosts.stored import size_of
from mmattn.models.loading import load_model

if TYPE_CHECKING:
    from mmattn.hosts.diffusion.scale import AdapterScale


class CallOptions(TypedDict, total=False):
    """Keywords of a call or block that belong to its memory.

    Args:
        adapter_scale: factor of the adapters' outputs, one number or a dict by adapter name; 0 gives exactly the host's
            output. For diffusion models also (b,), (b, height, width), (b, frames, height, width), a value per block,
            or a function of the timestep (`mmattn.hosts.diffusion.scale`).
        images: for language models: (b, l), the number of images up to each token, for visible_segments="latest" and
            "previous".
        arrived: for language models: (b, l), the number of slots that have arrived at each token; the token sees no
            later slots. Generated tokens use the last value. `MemoryStream` does the same for a growing memory.
        window: with `arrived`, the number of latest slots that each token sees; None for all.
        text_mask: for diffusion models: (rows, m) bool, the real tokens of the host's text; needs `use_core`.
        guided: for diffusion models, in `condition`: a diffusers pipeline computes classifier-free guidance inside the
            block, in batches of two or three parts or in separate calls. Unconditional rows and calls see no memory.
            They are recognised by the null class of DiT, by the pipeline's `cache_context` names, or by the order of
            diffusers' pipelines: at each timestep the conditional call comes first. A call that cannot be recognised
            raises ConditionError.
        negative_prompt_embeds: for diffusion models, in `condition`: (b, m, e), the embeddings of the negative prompt
            that the pipeline passes to the host. Rows with this text see no memory, in any order. Implies `guided`;
            needed for pipelines with another order than diffusers', such as InstructPix2Pix.
    """

    adapter_scale: AdapterScale
    images: Tensor | None
    arrived: Tensor | None
    window: int | None
    text_mask: Tensor | None
    guided: bool
    negative_prompt_embeds: Tensor | None


#: Keywords that libraries pass to `save_pretrained`, each with the values that ask for nothing here.
_SAVE_OPTIONS: dict[str, tuple[object, ...] | None] = {
    "safe_serialization": (True,),
    "state_dict": (None,),
    "push_to_hub": (False,),
    "token": (None,),
    "variant": (None,),
    "max_shard_size": None,  # any: an adapter is one small file
    "save_embedding_layers": ("auto", False),
}


class AdaptedModel(nn.Module):
    """A host and its adapters; the result of `attach`. Other attributes are read, set and deleted on the host.

    `.to()`, `.half()`, `.train()` and `.eval()` on either object reach both.

    To add a kind of host, subclass it, define which models it `matches` and which `sites` they offer, and register it
    with `register_host`. By default adapters act by hooks before and after the modules of the sites.

    Args:
        host: the frozen model.
        require_memory: raise for a call without a memory, instead of returning the host's answer.
    """

    kind: ClassVar[str] = ""
    positions: ClassVar[tuple[str, ...]] = ("after", "before")
    # Whether it may be attached without an adapter.
    attaches_bare: ClassVar[bool] = False
    # Keywords of a call that belong to the memory given beside them.
    memory_keywords: ClassVar[tuple[str, ...]] = ("adapter_scale",)
    # Whether its output has `logits` of the next token.
    predicts_tokens: ClassVar[bool] = False
    # The class of transformers that loads such a host by name.
    auto_class: ClassVar[str] = ""
    # The axis of residual streams in the hidden states at the sites; None where they are (b, l, d).
    stream_axis: int | None = None

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__()
        check_host(host)
        watch_peft(AdaptedModel)
        self.training = host.training
        self.host = host
        self.adapters = nn.ModuleDict().train(host.training)
        # nn.Module finds sub-modules by `__getattr__`, which each call would go through several times.
        self.__dict__.update(host=host, adapters=self.adapters)
        self.active: list[str] = []
        self.require_memory = require_memory
        self.open_blocks = OpenBlocks()
        self.attachment = Attachment(host)
        self._keywords_of_host = keywords_of(host)
        # Trainers ask a model's forward which columns of the data it reads.
        vars(self)["forward"] = forward = partial(type(self).forward, self)
        forward.__signature__ = shown_signature(host, self.memory_keywords)  # type: ignore[attr-defined]
        # Under autocast accelerate binds this function to the model again, so that a copy calls itself.
        forward.__func__ = type(self).forward  # type: ignore[attr-defined]
        self._state_prefix = ""
        self.register_load_state_dict_post_hook(_expect_no_host)

    # A kind of host ---------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return True if a model is of this kind."""

    @abstractmethod
    def sites(self, position: str) -> list[Site]:
        """Return every site of this position, in the order of the layers."""

    def check_adapter(self, adapter: AdapterLayers) -> None:
        """Check that changes at the sites of an adapter reach the output of the host."""

    def set_options(self, call: Call | None) -> None:
        """Set the options of `condition` that only some kinds of hosts take."""

    def is_apart(self, layer: int) -> bool:
        """Return whether a layer is in a part (an encoder) that is called by itself, with its own rows and tokens."""
        return False

    def asks_by_layer(self, call: Call) -> bool:
        """Return whether the layers of a compiled host can ask a memory for themselves, as if called alone."""
        return not any(source.follows_text for source in call.sources.values())

    def call_of_forward(self, args: Positional, kwargs: Keywords) -> tuple[Call | None, frozenset[str]]:
        """Return the memories of a forward that begins, and the adapters that do not exist for it."""
        return self.open_blocks.of_call(self.require_memory)[1:]

    def text_state(self, call: Call, args: Positional, kwargs: Keywords) -> TextState:
        """Return the text of one forward; by default the first argument, without a cache."""
        inputs = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        return TextState(inputs.shape[0], inputs.shape[1], inputs, past=0)

    def forward_step(
        self, call: Call, disabled: frozenset[str], host: nn.Module, args: Positional, kwargs: Keywords
    ) -> ForwardStep:
        """Return the actions of the adapters in one forward of the host."""
        text = self.text_state(call, args, kwargs)
        return ForwardStep(self, host, None, self.actions(call, disabled, text))

    def lost_layers(self, step: ForwardStep) -> list[int]:
        """Return the layers that memory was meant for in a forward and did not reach."""
        return sorted({layer for layer, _ in step.actions} - step.visited)

    def check_reached(self, layers: Sequence[int]) -> None:
        """Refuse an output that memory did not reach because layers of the host were replaced."""
        parts = set(self.host.modules())
        lost = [layer for (layer, _), module in self.hooked.items() if layer in layers and module not in parts]
        if lost:
            raise ConditionError(
                f"layers {sorted(set(lost))} of {type(self.host).__name__} were replaced after attach, and memory did "
                "not reach them: unload() before you change the host, and attach again"
            )

    def check_answer(self, step: ForwardStep, output: object) -> None:
        """Refuse an output that is not finite."""

    def note_output(self, output: object) -> None:
        """Note the output of a forward without actions, as in a compiled graph."""

    def example_batch(self, generator: torch.Generator, config: AdapterConfig, rows: int) -> dict[str, Tensor]:
        """Return a random batch of arguments of the host, without a memory; for the doctor and the contract tests."""
        raise ConditionError(f"{type(self).__name__} has no example_batch: give the doctor a batch of your own")

    @classmethod
    def load_host(cls, name: str | PathLike[str]) -> nn.Module:
        """Load the host of this name or in this folder, for `mmattn doctor`."""
        if not cls.auto_class:
            raise ConditionError(
                f"hosts of kind {cls.kind!r} are not loaded by name: load it and use mmattn.load(host, …)"
            )
        return load_model(cls.auto_class, name, f"host of kind {cls.kind!r}")

    def read_single_file(self, path: str | PathLike[str]) -> tuple[AdapterConfig, dict[str, Tensor]]:
        """Return the settings and tensors of an adapter published as one file, for hosts that know such a layout."""
        raise AdapterFileError(
            f"cannot load an adapter from the file {str(path)!r} onto {type(self.host).__name__}: name the folder that "
            "save_adapter wrote"
        )

    # Lifecycle: attach, move, unload ----------------------------------------------------------------------------------

    def join(self) -> None:
        """Freeze the host, and follow it where it is moved."""
        self.attachment.freeze()
        self.attachment.replace(self.host, "_apply", self._host_apply)
        self.attachment.replace(self.host, "train", self._host_train)
        self.attachment.replace(self.host, MARK, self)

    def unload(self) -> nn.Module:
        """Remove all adapters and return the unchanged host."""
        self.attachment.leave()
        return self.host

    def check_attached(self) -> None:
        """Refuse to act on a host from which these adapters were unloaded."""
        if self.host.__dict__.get(MARK) is not self:
            raise ConditionError("the adapters were unloaded from this host and reach it no longer: attach again")

    def train(self, mode: bool = True) -> Self:
        """Set training mode of host and adapters."""
        self.host.train(mode)
        self.training = mode
        return self

    def _host_train(self, mode: bool = True) -> nn.Module:
        type(self.host).train(self.host, mode)
        self.adapters.train(mode)
        self.training = mode
        return self.host

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.host._apply(fn, recurse)
        return self

    def _host_apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        type(self.host)._apply(self.host, fn, recurse)
        self.adapters._apply(fn, recurse)
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
        if any(hasattr(part, "weights_map") for part in getattr(hook, "hooks", (hook,))):
            self.__dict__.pop("_old_forward", None)
            raise ConditionError(
                "accelerate looks weights up in state_dict(), where an adapted model has no frozen ones: give "
                "model.host to cpu_offload, disk_offload or dispatch_model"
            )

    def _get_name(self) -> str:
        # By this name a Trainer of transformers knows whose labels are to be shifted.
        return type(inner_host(self.host)).__name__

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        self.attachment.forget_lost_hooks()
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
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
        """Activate these adapters, in this order; an empty list deactivates all.

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
        """Attach another adapter and activate it, beside the active adapters.

        Args:
            name: name of the adapter, to switch, combine and save it.
            adapter: its settings.

        Raises:
            AttachError: the name is taken or not a plain name, or the adapter is for another kind of host.
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
        built = build_layers(adapter, adapter.sites(self))
        if any(tensor.is_meta for tensor in (*built.parameters(), *built.buffers())):
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
        """Remove an adapter and its weights; remove the last adapter with `unload`.

        Raises:
            AttachError: the adapter is not attached, or is the last one.
            ConditionError: inside a block that gives a memory.
        """
        self.adapter(name)
        self._check_no_block("delete_adapter")
        if len(self.adapters) == 1:
            raise AttachError(f"{name!r} is the only adapter: use unload()")
        del self.adapters[name]
        self.active = [active for active in self.active if active != name]
        self.refresh_hooks()

    def _check_no_block(self, verb: str) -> None:
        """Refuse to change the adapters whose memory a block of this context holds."""
        if self.open_blocks.in_force().call is not None:
            raise ConditionError(
                f"{verb} inside a condition block, whose memory is for the adapters that were active where it began: "
                "leave the block first, or use disable_adapter()"
            )

    def trainable_parameters(self) -> tuple[int, int]:
        """Return the number of trained parameters, and of all parameters with the host."""
        counts = [(size_of(p), p.requires_grad) for p in self.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters as `PreTrainedModel.num_parameters` does, the adapters' included."""
        host: Any = self.host
        adapters = [p for p in self.adapters.parameters() if p.requires_grad or not only_trainable]
        return int(host.num_parameters(only_trainable, exclude_embeddings)) + sum(map(size_of, adapters))

    def print_trainable_parameters(self) -> None:
        """Print the numbers in the format of peft."""
        trained, total = self.trainable_parameters()
        print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}")

    # Files ------------------------------------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """Return the adapters with their settings, and trained parameters of the host (a LoRA), without frozen ones.

        This keeps the checkpoints of every trainer small, and `mmattn.load` reads those of `transformers.Trainer`.
        `load_state_dict` accepts states with and without the frozen host. `host.state_dict()` has the whole host.

        Args:
            destination: as in `torch.nn.Module`.
            prefix: as in `torch.nn.Module`.
            keep_vars: as in `torch.nn.Module`; True (from `torch.export`) returns the whole host, without settings.
        """
        state: dict[str, Tensor] = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if not keep_vars:
            names = [name for name in self.adapters if is_registered(self.adapter(name).config)]
            configs = {name: self._adapter_config(name, with_fingerprint=False) for name in names}
            keep_trained(state, prefix, self.host, configs)
        return state

    def _adapter_config(self, name: str, encoder: str | None = None, *, with_fingerprint: bool = True) -> Arguments:
        adapter = self.adapter(name)
        sites = self.sites(adapter.position)
        return adapter_config(adapter, self.host, self.kind, sites, encoder, with_fingerprint)

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
            encoder: fingerprint of the encoder it was trained with, written to the file.

        Raises:
            AttachError: there is no such adapter.
            NonFiniteError: a weight is NaN or infinite.
        """
        write_adapter(path, self.adapter(name), self._adapter_config(name, encoder))

    def push_to_hub(
        self, repository: str, name: str = DEFAULT, *, encoder: str | None = None, **options: Unpack[HubOptions]
    ) -> str:
        """Upload one adapter, and nothing of the host, to the Hugging Face hub.

        Args:
            repository: "org/name"; created if missing.
            name: of the adapter.
            encoder: as in `save_adapter`.
            options: `private`, `revision`, `token` and `commit_message`, as in
                `transformers.PreTrainedModel.push_to_hub`; a missing branch is created.

        Returns:
            The address of the commit.

        Raises:
            AdapterFileError: the hub rejects it or cannot be reached.
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
        **options: object,
    ) -> None:
        """Write the adapters in peft's layout, without the host; `host.save_pretrained` writes the host.

        The adapter "default" is written into the folder, every other adapter into a subfolder of its name, each as by
        `save_adapter`. `mmattn.load(host, save_directory)` loads "default", and with `name` another adapter.

        Args:
            save_directory: the folder.
            selected_adapters: names of the adapters; all by default.
            encoder: as in `save_adapter`.
            is_main_process: False writes nothing, for the other processes of a run.
            options: further keywords of `save_pretrained` in transformers and peft, with their default values.

        Raises:
            AttachError: a name that is not attached, or no adapter at all.
            ConfigError: an option with another value.
            NonFiniteError: a weight is NaN or infinite.
        """
        for option, value in options.items():
            allowed = _SAVE_OPTIONS.get(option, ())
            if allowed is not None and value not in allowed:
                raise ConfigError(
                    f"save_pretrained of an adapter takes no {option}={value!r}: leave it out (an upload is "
                    "model.push_to_hub)"
                )
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
        """Not supported: load an adapter's folder onto a host with `mmattn.load(host, folder)`.

        Raises:
            ConditionError: always.
        """
        raise ConditionError(
            f"{cls.__name__} has no from_pretrained: load the host by its own from_pretrained, then the adapter with "
            "model = mmattn.load(host, folder)"
        )

    # Memory --------------------------------------------------------------------------------------------------------

    def prepare(self, memory: object) -> Any:
        """Check a memory and cache its keys and values for many calls; pass the result as `memory`.

        Args:
            memory: a memory for all active adapters, or a dict by adapter name.

        Raises:
            ShapeError: a memory that does not fit.
            NonFiniteError: NaN or infinity in a slot that may be attended to.
            ConditionError: no adapter is active, or the memory belongs to one call.
        """
        prepared = {name: bound.shareable() for name, bound in self.bind(memory).items()}
        if not prepared:
            raise ConditionError("no adapter is active to prepare a memory for: set_adapter(name) first")
        return prepared if isinstance(memory, Mapping) else next(iter(prepared.values()))

    def bind(self, memory: object) -> dict[str, BoundMemory]:
        """Validate a memory and bind it to each adapter that is given it; called once for each call of the host."""
        if not isinstance(memory, Mapping):
            memory = dict.fromkeys(self.active, memory)
        bound: dict[str, BoundMemory] = {}
        adapters: Mapping[str, AdapterLayers] = self.adapters._modules  # type: ignore[assignment]
        for name, value in memory.items():
            adapter, shared = adapters.get(name) or self.adapter(name), value
            for earlier, source in bound.items():  # no ids: a compiler would take each for a constant
                if memory[earlier] is value:
                    shared = source.shared
            bound[name] = adapter.bind(shared, self.host)
        return bound

    def make_call(
        self, memory: object, adapter_scale: float | Mapping[str, float] = 1.0, **options: Any
    ) -> Call | None:
        """Return the call of a memory, or None without one."""
        self.check_attached()
        if memory is None:
            scale_by_adapter(adapter_scale, ())
            if options:
                self.set_options(None, **options)
            check_not_required(self.require_memory)
            return None
        sources = self.bind(memory)
        scales = scale_by_adapter(adapter_scale, sources)
        for name, scale in scales.items():
            if not scale:
                del sources[name]
        call = Call(sources, scales) if sources or not scales else None
        if options:
            self.set_options(call, **options)
        return call

    def options_of(self, kwargs: Arguments) -> Arguments:
        """Take the keywords that belong to a memory out of those of a call; refuse near misses of them."""
        unnamed = [name for name in kwargs if name not in self._keywords_of_host]
        if unnamed:
            check_keywords(self.host, self.memory_keywords, unnamed)
        return {name: kwargs.pop(name) for name in self.memory_keywords if name in kwargs}

    @contextlib.contextmanager
    def condition(self, memory: object, **options: Unpack[CallOptions]) -> Iterator[Self]:
        """Pass this memory to every call of the host inside the block; None for no memory.

        Args:
            memory: (b, m, e) for all active adapters, or a dict by adapter name.
            options: the `CallOptions` of this kind of host.

        Raises:
            ShapeError: a memory or scale that does not fit.
            ConfigError: an adapter_scale for an adapter without a memory, or of another kind of host.
            NonFiniteError: NaN or infinity in a slot that may be attended to, or in a scale.
            ConditionError: a generator opens the block.
        """
        keywords: Arguments = {**options}
        call = self.make_call(memory, **keywords)
        with prepared_for_graphs(call), self.open_blocks.conditioned(call, is_condition=True):
            yield self

    def forward(self, *args: Any, memory: object = None, labels: object = None, **kwargs: Any) -> Any:
        """Call the host with a memory and return its output.

        Args:
            args: arguments of the host.
            memory: (b, m, e), a row for each row of the batch, for all adapters, or a dict by adapter name. None uses
                the memory of the surrounding `condition` block; without a block the host runs alone. A `ChunkedAdapter`
                also takes a function that finds the neighbours of chunks, a `ComposedAdapter` an `AugmentingModel`.
            labels: labels of the host; named here because Trainers inspect the signature for them.
            kwargs: arguments of the host, and options of `condition`.

        Raises:
            ConfigError: a misspelt keyword of mmattn.
        """
        options = self.options_of(kwargs) if kwargs else {}
        if labels is not None:
            kwargs["labels"] = labels
        with self.block_of_call(memory, options):
            return self.host(*args, **kwargs)

    def block_of_call(self, memory: object, options: Arguments) -> AbstractContextManager[None]:
        """Return the block of one call with `memory=`; without a memory its options are refused."""
        if memory is not None:
            return self.open_blocks.conditioned(self.make_call(memory, **options))
        check_unused(**options)
        return contextlib.nullcontext()

    def calibrate(self, *args: Any, memory: object, **kwargs: Any) -> None:
        """Calibrate fresh gated adapters with a training batch: mean and spread of the states that each block reads.

        Only tokens that attend to the memory count. The adapter still changes nothing. `AdapterTrainer` does this with
        its first batch; call it yourself before another training loop.

        Args:
            args: arguments of the host.
            memory: as in `forward`.
            kwargs: as in `forward`.

        Raises:
            ConditionError: no fresh adapter has gated blocks, or fewer than two tokens attend to the memory.

        >>> import mmattn
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                                   num_attention_heads=4)).eval()
        >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, layers=[1]))
        >>> model.calibrate(torch.tensor([[5, 6, 7]]), memory=torch.randn(1, 11, 24))
        >>> model.adapter("default").block(1).calibration.spread.shape
        torch.Size([32])
        """
        fresh = fresh_adapters(self)
        if not fresh:
            raise ConditionError(
                "calibrate needs a fresh adapter with gated blocks, and no attached adapter has its gates at 0"
            )
        with calibrating(self):
            self(*args, memory=memory, **kwargs)
        if missed := [adapter.name for adapter in fresh if not adapter.config.layout.calibrated]:
            raise ConditionError(f"adapters {missed} were not calibrated: fewer than two tokens attended to a memory")

    @contextlib.contextmanager
    def disable_adapter(self, names: str | Sequence[str] | None = None) -> Iterator[Self]:
        """Disable adapters inside the block, whatever memory a call passes.

        Args:
            names: names of the adapters; all by default.

        Raises:
            AttachError: a name that is not attached.
            ConditionError: a generator opens the block.
        """
        off = set(self.adapters) if names is None else {names} if isinstance(names, str) else set(names)
        for name in off:
            self.adapter(name)
        with self.open_blocks.without(off, everything=off == set(self.adapters)):
            yield self

    # One forward ------------------------------------------------------------------------------------------------------

    def actions(
        self, call: Call, disabled: frozenset[str], text: TextState, site: tuple[int, str] | None = None
    ) -> dict[tuple[int, str], list[Action]]:
        """Return the actions of the active adapters at each site, or at one."""
        actions: dict[tuple[int, str], list[Action]] = {}
        adapters: Mapping[str, AdapterLayers] = self.adapters._modules  # type: ignore[assignment]
        for name, source in call.sources.items():
            adapter = adapters[name]
            if name not in self.active or name in disabled or (site is not None and site not in adapter.places):
                continue
            if source.follows_text:
                # This very host may be called for it, without a memory.
                with self.open_blocks.conditioned(None):
                    view = source.step(text)
            else:
                view = source.step(text)
            if text.packed is not None:
                view = view.pack(text.packed)
            blocks, scale = adapter.blocks._modules, call.scales.get(name, 1.0)
            for place in adapter.places if site is None else [site]:
                actions.setdefault(place, []).append((view, blocks[str(place[0])], scale))
        return actions

    def actions_of_part(self, x: Tensor, site: tuple[int, str]) -> Sequence[Action]:
        """Return the actions on hidden states x (b, l, d) if only a part of the host was called."""
        call, disabled = self.open_blocks.of_call(self.require_memory)[1:]
        if call is None:
            return ()
        text = TextState(
            x.shape[0],
            x.shape[1],
            images=call.images,
            arrivals=call.arrivals,
            expansions=call.expansions,
            layer=site[0],
        )
        return self.actions(call, disabled, text, site).get(site, ())

    def refresh_hooks(self) -> None:
        """Hook exactly the sites of the present adapters."""
        self.attachment.remove_hooks()
        self.attachment.hooks = self.install_hooks() + leave_uncompiled(self)

    def install_hooks(self) -> list[Handle]:
        """Hook the adapters to the host and its layers, and return the handles."""
        sites = {
            (site.layer, site.position, site.module) for name in self.adapters for site in self.adapter(name).sites
        }
        self.hooked = {(layer, position): self.host.get_submodule(module) for layer, position, module in sorted(sites)}
        hooks = HostHooks(self).install(self.host)
        return hooks + [hook for site, module in self.hooked.items() for hook in self.hook_site(module, *site)]

    def hook_site(self, module: nn.Module, layer: int, position: str) -> list[Handle]:
        """Hook the adapters to one site, and return the handles."""
        return [CrossAttentionHook(self, layer, position).install(module, position)]

    # For `mmattn.inspect` -------------------------------------------------------------------------------------------

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Return the modules that attend to a memory, by adapter and layer of the host."""
        named = ((name, self.adapter(name)) for name in self.adapters)
        attentions = {(name, layer): adapter.attention(layer) for name, adapter in named for layer in adapter.layers}
        return {site: attention for site, attention in attentions.items() if attention is not None}

    def changed_output(self, adapter: AdapterLayers, index: int) -> tuple[nn.Module, int]:
        """Return the module whose output an adapter changes at a layer, and the index among several outputs."""
        return self.layer(index), 0

    def layer(self, index: int) -> nn.Module:
        """Return the host's layer of this number."""
        position = self.positions[0]
        return self.host.get_submodule(self.sites(position)[index].module)


def adapted(host: nn.Module) -> AdaptedModel | None:
    """Return the adapted model of a host that has adapters, or None."""
    model = host.__dict__.get(MARK)
    return model if isinstance(model, AdaptedModel) else None


def check_unused(adapter_scale: object = 1.0, **options: object) -> None:
    """Refuse options of a call that only have a meaning together with a memory."""
    if not (isinstance(adapter_scale, (int, float)) and adapter_scale == 1):
        options["adapter_scale"] = adapter_scale
    for name, value in options.items():
        if value is not None:
            raise ConditionError(
                f"{name}= was given without memory=, which it belongs to: give both to this call, or both to "
                "condition()"
            )


def _holds(module: nn.Module, name: str) -> bool:
    """Return whether a module or its class has an attribute, and not only `__getattr__` of it."""
    fields = vars(module)
    registered = (fields[kind] for kind in ("_parameters", "_buffers", "_modules"))
    return name in fields or hasattr(type(module), name) or any(name in names for names in registered)


def _expect_no_host(model: nn.Module, keys: _IncompatibleKeys) -> None:
    """Let a state dict go without the frozen host."""
    assert isinstance(model, AdaptedModel)
    start = f"{model._state_prefix}host."
    trained = {start + name for name in trained_names(model.host)}
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith(start) or key in trained]


def scale_by_adapter(adapter_scale: float | Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return the factor of the result of each adapter of a call."""
    if type(adapter_scale) is float and adapter_scale == 1.0:
        return dict.fromkeys(names, 1.0)
    if not isinstance(adapter_scale, Mapping):
        return dict.fromkeys(names, check_float("adapter_scale", adapter_scale))
    if set(adapter_scale) != set(names):
        raise ConfigError(
            f"adapter_scale by name must name the adapters that are given a memory, {sorted(names)}, and names "
            f"{list(adapter_scale)}"
        )
    return {name: check_float(f"adapter_scale[{name!r}]", scale) for name, scale in adapter_scale.items()}
