"""The verbs shared by all hosts: adapters by name, memory by call, files."""

from __future__ import annotations

import contextlib
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters import forms
from mmattn.adapters.adapter_layers import AdapterLayers
from mmattn.adapters.file_format import check_name
from mmattn.adapters.protocols import Site
from mmattn.adapters.registry import is_adapter, kinds_at
from mmattn.adapters.text_state import TextState
from mmattn.errors import AdapterFileError, AttachError, ConditionError, check_float
from mmattn.hosts.attached import adapted, check_host, forget_compiled
from mmattn.hosts.blocks import OpenBlocks
from mmattn.hosts.calls import Action, Call, ForwardStep
from mmattn.hosts.hooks import AfterHost, BeforeHost, hook_layer
from mmattn.hosts.interop.quantised import size_of
from mmattn.hosts.saved import SavedModel


class AdaptedModel(SavedModel):
    """A host and its adapters; what `attach` returns. Whatever is not found here is looked up on the host.

    A kind of host of its own subclasses it, says which models it `matches` and which `sites` they offer, and is
    registered with `register_host`. By default adapters act by hooks before and after the modules that the sites name.

    Args:
        host: the frozen model.
        require_memory: calls without a memory raise instead of giving the host's own answer.
    """

    kind: ClassVar[str] = ""
    positions: ClassVar[tuple[str, ...]] = ("after", "before")
    # Whether it may be attached without an adapter.
    attaches_bare: ClassVar[bool] = False
    # Keywords of a call that belong to the memory given beside them.
    memory_keywords: ClassVar[tuple[str, ...]] = ("adapter_scale",)
    # Whether its output has `logits` of the next token.
    predicts_tokens: ClassVar[bool] = False

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__(check_host(host))
        self.require_memory = require_memory
        self.active: list[str] = []
        self.open_blocks = OpenBlocks()

    # What a kind of host says of itself ----------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether a model is of this kind."""

    @abstractmethod
    def sites(self, position: str) -> list[Site]:
        """Every site of this position, in the order of the layers."""

    def text_state(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TextState:
        """What the host is given in one forward; by default its first argument is what it reads, without a cache."""
        given = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        return TextState(given.shape[0], given.shape[1], given, past=0, images=call.images)

    def example_batch(self, generator: torch.Generator, config: Any, rows: int) -> dict[str, Any]:
        """A random batch as the host is called with, without a memory; for the doctor and the shared tests.

        Args:
            generator: of the random numbers.
            config: settings of the adapter that it is for.
            rows: b.
        """
        raise ConditionError(f"{type(self).__name__} has no example_batch: give the doctor a batch of your own")

    @classmethod
    def load_host(cls, name: str | PathLike[str]) -> nn.Module:
        """The host of this name or in this folder, for `mmattn doctor`."""
        raise ConditionError(f"hosts of kind {cls.kind!r} are not loaded by name: load it and use mmattn.load(host, …)")

    def read_single_file(self, path: str | PathLike[str]) -> tuple[Any, dict[str, Tensor]]:
        """The settings and tensors of an adapter published as one file, for hosts that know such a layout.

        Raises:
            AdapterFileError: this kind of host knows none.
        """
        raise AdapterFileError(
            f"cannot load an adapter from the file {str(path)!r} onto {type(self.host).__name__}: name the folder that "
            "save_adapter wrote"
        )

    def check_adapter(self, adapter: AdapterLayers) -> None:
        """Prove that what an adapter writes at its sites reaches the host's answer.

        Raises:
            AttachError: it cannot be proved.
            ConditionError: it does not.
        """

    # Adapters ------------------------------------------------------------------------------------------------------

    def set_adapter(self, names: str | Sequence[str]) -> None:
        """Make these adapters, in this order, the active ones; an empty list is none.

        Raises:
            AttachError: a name that is not attached.
        """
        selected = [names] if isinstance(names, str) else list(names)
        for name in selected:
            self.adapter(name)
        self.active = selected

    def add_adapter(self, name: str, adapter: Any) -> None:
        """Put another adapter on the host, active beside those that are.

        Args:
            name: to switch, combine and save it by.
            adapter: its settings.

        Raises:
            AttachError: the name is taken or no plain name, or the adapter is not for this kind of host.
            ConditionError: memory cannot reach its layers, or the adapters were unloaded.
        """
        self._check_new(name)
        fits = is_adapter(adapter) and set(adapter.positions) & set(self.positions)
        if not fits:
            raise AttachError(
                f"{type(self.host).__name__} is a host of kind {self.kind!r} and takes {kinds_at(self.positions)}; got "
                f"{type(adapter).__name__}"
            )
        built = adapter.build(adapter.sites(self))
        built.name = name
        self.check_adapter(built)
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
        """
        self.adapter(name)
        if len(self.adapters) == 1:
            raise AttachError(f"{name!r} is the only adapter: use unload()")
        del self.adapters[name]
        self.active = [other for other in self.active if other != name]
        self.refresh_hooks()

    def add_weighted_adapter(self, names: Sequence[str], weights: Sequence[float], name: str) -> None:
        """Merge adapters of equal settings into a new one (model soups, arXiv 2203.05482, section 2).

        It is not active: `set_adapter(name)` uses it instead of the others.

        Args:
            names: of the adapters to merge.
            weights: one for each; those of the new adapter are the weighted sum.
            name: of the new adapter.

        Raises:
            AttachError: an adapter that is not attached, a name that is taken, or settings that differ.
            ConfigError: another number of weights than adapters.
        """
        from mmattn.hosts.merging import weighted_sum

        given = [self.adapter(one) for one in names] if not isinstance(names, str) else names
        merged = weighted_sum(given, weights)
        active = list(self.active)
        self.add_adapter(name, given[0].config)  # type: ignore[union-attr]
        self.active = active
        self.adapter(name).load_state_dict(merged)

    def _check_new(self, name: str) -> None:
        if self.adapters:
            self.check_attached()
        check_name(name)
        if name in self.adapters:
            raise AttachError(
                f"an adapter {name!r} is already attached; choose another name or delete_adapter({name!r})"
            )

    def adapter(self, name: str) -> AdapterLayers:
        """The trainable part of the adapter of this name.

        Raises:
            AttachError: there is none.
        """
        if name not in self.adapters:
            raise AttachError(f"no adapter {name!r} is attached; there are: {', '.join(self.adapters) or 'none'}")
        layers = self.adapters[name]
        assert isinstance(layers, AdapterLayers)
        return layers

    def trainable_parameters(self) -> tuple[int, int]:
        """Numbers of trained parameters and of all, host included."""
        counts = [(size_of(p), p.requires_grad) for p in self.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    def print_trainable_parameters(self) -> None:
        """Print the numbers in the words of peft."""
        trained, total = self.trainable_parameters()
        print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}")

    # Memory --------------------------------------------------------------------------------------------------------

    def prepare(self, memory: Any) -> Any:
        """Check a memory and cache what the adapters compute of it, for many calls; give the result as `memory`.

        Args:
            memory: one for all active adapters, or one by adapter name.

        Raises:
            ShapeError: a memory that does not fit.
            NonFiniteError: NaN or infinity in a slot that may be attended to.
            ConditionError: no adapter is active, or the memory belongs to one call.
        """
        prepared = self.prepare_by_name(memory)
        for name, one in prepared.items():
            forms.check_shareable(self.adapter(name), one)
        if not prepared:
            raise ConditionError("no adapter is active to prepare a memory for: set_adapter(name) first")
        return prepared if isinstance(memory, Mapping) else next(iter(prepared.values()))

    def prepare_by_name(self, memory: Any) -> dict[str, Any]:
        """What each adapter that is given a memory makes of it."""
        given = dict(memory) if isinstance(memory, Mapping) else dict.fromkeys(self.active, memory)
        shared: dict[int, Any] = {}
        prepared = {}
        for name, one in given.items():
            prepared[name] = forms.prepare(self.adapter(name), shared.get(id(one), one))
            shared.setdefault(id(one), prepared[name])
        return prepared

    def bind(self, memory: Any) -> dict[str, Any]:
        """The source of a call for each adapter that is given a memory."""
        prepared = self.prepare_by_name(memory)
        return {name: forms.bind(self.adapter(name), one, self.host) for name, one in prepared.items()}

    def make_call(self, memory: Any, adapter_scale: float = 1.0, images: Tensor | None = None) -> Call | None:
        """What a call with this memory sees; None is no memory."""
        self.check_attached()
        adapter_scale = check_float("adapter_scale", adapter_scale)
        if memory is None:
            self.check_not_required()
            return None
        call = Call(self.bind(memory), adapter_scale, images)
        if adapter_scale == 0:
            return None
        call.prepare_graphs()
        return call

    @contextlib.contextmanager
    def condition(self, memory: Any, *, adapter_scale: float = 1.0) -> Iterator[Any]:
        """Every call of the host inside the block sees this memory; None is no memory.

        Args:
            memory: (b, m, e), one for all active adapters, or one by adapter name.
            adapter_scale: multiplies what the adapters add; 0 is exactly nothing.

        Raises:
            ShapeError: a memory that does not fit.
            NonFiniteError: NaN or infinity in a slot that may be attended to.
        """
        call = self.make_call(memory, adapter_scale)
        with self.open_blocks.conditioned(call, is_condition=True):
            yield self
        if call is not None:
            call.check_graphs()

    def forward(self, *args: Any, memory: Any = None, adapter_scale: float = 1.0, **kwargs: Any) -> Any:
        """Call the host with a memory; returns what the host returns.

        Args:
            args: the host's own.
            memory: (b, m, e), one row for each row of the batch; one for all adapters or one by adapter name. None: the
                memory of the surrounding `condition` block, or the host's own output.
            adapter_scale: as in `condition`.
            kwargs: the host's own.
        """
        if memory is None:
            check_unused(adapter_scale=(adapter_scale, 1.0))
            return self.host(*args, **kwargs)
        with self.open_blocks.conditioned(self.make_call(memory, adapter_scale)):
            return self.host(*args, **kwargs)

    @contextlib.contextmanager
    def disable_adapter(self, names: str | Sequence[str] | None = None) -> Iterator[Any]:
        """Inside the block these adapters do not exist, whatever memory a call gives.

        Args:
            names: of the adapters; all by default.

        Raises:
            AttachError: a name that is not attached.
        """
        off = set(self.adapters) if names is None else {names} if isinstance(names, str) else set(names)
        for name in off:
            self.adapter(name)
        with self.open_blocks.without(off, everything=off == set(self.adapters)):
            yield self

    def check_attached(self) -> None:
        """Refuse to act on a host that these adapters were taken from.

        Raises:
            ConditionError: they were.
        """
        if adapted(self.host) is not self:
            raise ConditionError("the adapters were unloaded from this host and reach it no longer: attach again")

    def check_not_required(self) -> None:
        """Refuse a call without a memory, where one is required.

        Raises:
            ConditionError: it is.
        """
        if self.require_memory:
            raise ConditionError("this host was attached with require_memory=True and no memory was given")

    # One forward ---------------------------------------------------------------------------------------------------

    def current_call(self) -> tuple[Call | None, frozenset[str]]:
        """What calls made here see, and which adapters do not exist for them.

        Raises:
            ConditionError: a memory is required and there is none.
        """
        found, call, disabled = self.open_blocks.in_force()
        if not found:
            if self.require_memory:
                raise ConditionError(
                    "this host was attached with require_memory=True and was called without: give memory= or use "
                    "condition(memory); a new thread does not inherit the block it was started in"
                )
            if not torch.compiler.is_compiling():
                self.open_blocks.warn_of_others()
        return call, disabled

    def forward_step(
        self, call: Call, disabled: frozenset[str], host: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ForwardStep:
        """What the adapters do in one forward of the host."""
        text = self.text_state(call, args, kwargs)
        return ForwardStep(self, host, None, self.actions(call, disabled, text))

    def requested_call(self, kwargs: Mapping[str, Any]) -> Call | None:
        """What a forward sees that was begun elsewhere, with a memory for each of its requests; None is nothing."""
        return None

    def host_inputs(self, step: ForwardStep, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name with which the host is called where a memory is given: those of the caller."""
        return kwargs

    def actions(
        self, call: Call, disabled: frozenset[str], text: TextState, site: tuple[int, str] | None = None
    ) -> dict[tuple[int, str], list[Action]]:
        """What the active adapters do at each site, or at one of them."""
        actions: dict[tuple[int, str], list[Action]] = {}
        for name, source in call.sources.items():
            adapter = self.adapter(name)
            sites = [(layer, adapter.position) for layer in adapter.layers]
            if name not in self.active or name in disabled or (site is not None and site not in sites):
                continue
            if source.follows_text:
                # This very host may be asked, which then reads no memory.
                with self.open_blocks.conditioned(None):
                    view = source.step(text)
            else:
                view = source.step(text)
            for own in sites if site is None else [site]:
                actions.setdefault(own, []).append((view, adapter.block(own[0]), call.adapter_scale))
        return actions

    def actions_of_part(self, x: Tensor, site: tuple[int, str]) -> Sequence[Action]:
        """What the adapters do to hidden states x (b, l, d) where only a part of the host was called."""
        call, disabled = self.current_call()
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
        """Listen at exactly the sites where the adapters of this moment act."""
        forget_compiled()
        for hook in self._hooks:
            hook.remove()
        self._hooks = self.install_hooks()

    def install_hooks(self) -> list[Any]:
        """Hook the adapters to the host and its layers; the handles."""
        hooks = [
            self.host.register_forward_pre_hook(BeforeHost(self), with_kwargs=True),
            self.host.register_forward_hook(AfterHost(self), always_call=True),
        ]
        self.hooked = {site: self.host.get_submodule(module) for site, module in self.used_sites().items()}
        return hooks + [hook_layer(self, module, *site) for site, module in self.hooked.items()]

    def used_sites(self) -> dict[tuple[int, str], str]:
        """The sites where adapters act, with the names of the host's modules, in the order of the layers."""
        sites = {
            (site.layer, site.position): site.module for name in self.adapters for site in self.adapter(name).sites
        }
        return dict(sorted(sites.items()))

    def check_host_call(self, host: nn.Module) -> None:
        """Refuse a call of the host in a state in which memory would be lost."""

    def check_reached(self, layers: Sequence[int]) -> None:
        """Refuse an answer that memory did not reach, because layers of the host are not where they were.

        Args:
            layers: whose hooks did not run.

        Raises:
            ConditionError: one is no longer part of the host.
        """
        parts = set(self.host.modules())
        lost = [layer for (layer, _), module in self.hooked.items() if layer in layers and module not in parts]
        if lost:
            raise ConditionError(
                f"layers {sorted(set(lost))} of {type(self.host).__name__} were replaced after the adapters were "
                "attached, so memory did not reach them: unload() before the host is changed, and attach again after it"
            )

    # For looking on ------------------------------------------------------------------------------------------------

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Everything that attends to a memory: by adapter and host layer, what `inspect` listens to."""
        named = ((name, self.adapter(name)) for name in self.adapters)
        found = {(name, layer): adapter.attention(layer) for name, adapter in named for layer in adapter.layers}
        return {site: attention for site, attention in found.items() if attention is not None}

    def layer(self, index: int) -> nn.Module:
        """The host's layer of this number, at which adapters act."""
        position = self.positions[0]
        return self.host.get_submodule(self.sites(position)[index].module)

    # Files -------------------------------------------------------------------------------------------------------

    def save_adapter(self, path: str | PathLike[str], name: str = "default", *, encoder: str | None = None) -> None:
        """Write one adapter as a folder: `adapter_config.json`, `adapter_model.safetensors`, `README.md`.

        Args:
            path: the folder.
            name: of the adapter.
            encoder: fingerprint of the encoder whose memories it was trained on, written to the file.

        Raises:
            AttachError: there is no such adapter.
            NonFiniteError: a weight is NaN or infinite.
        """
        from mmattn.hosts.saving import save

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
        """Upload one adapter, and nothing of the host, to the Hugging Face hub.

        Args:
            repository: "org/name"; made where it is missing.
            name: of the adapter.
            encoder: as in `save_adapter`.
            private: as in `transformers.PreTrainedModel.push_to_hub`.
            revision: a branch, made where it is missing.
            token: as in `transformers.PreTrainedModel.push_to_hub`.
            commit_message: as in `transformers.PreTrainedModel.push_to_hub`.

        Returns:
            the address of the commit.

        Raises:
            AdapterFileError: the hub refused it, or cannot be reached.
        """
        from mmattn.hosts.interop.hub import upload

        with tempfile.TemporaryDirectory() as folder:
            self.save_adapter(folder, name, encoder=encoder)
            message = commit_message or f"Adapter {name}"
            return upload(folder, repository, private=private, revision=revision, token=token, message=message)


def check_unused(**given: tuple[Any, Any]) -> None:
    """Refuse what only has a meaning together with a memory.

    Args:
        given: by name, the value given and the one that says nothing.

    Raises:
        ConditionError: one was given.
    """
    for name, (value, nothing) in given.items():
        if value is not nothing and not (isinstance(value, (int, float)) and value == nothing):
            raise ConditionError(
                f"{name}= was given without memory=, which it belongs to: give both to this call, or both to "
                "condition()"
            )
