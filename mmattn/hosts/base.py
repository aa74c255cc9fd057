"""The verbs shared by all hosts: a memory for each call or block."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from mmattn.adapters import memory_types  # noqa: F401  (it registers them)
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import AdapterConfig, BoundMemory
from mmattn.errors import AdapterFileError, ConditionError
from mmattn.hosts.calibration import calibrating, fresh_adapters
from mmattn.hosts.context import Arguments, Call, Keywords, prepared_for_graphs, scale_by_adapter
from mmattn.hosts.hooks import HookedModel
from mmattn.hosts.keywords import check_keywords, keywords_of, shown_as
from mmattn.hosts.ownership import MARK
from mmattn.models.loading import load_model


class CallOptions(TypedDict, total=False):
    """Keywords of a call that belong to its memory; some kinds of hosts take further ones.

    Args:
        adapter_scale: multiplies the outputs of the adapters, one number for all or one by adapter name; 0 is exactly
            nothing.
        images: (b, l) images begun at or before each token, for visible_segments="latest" and "previous".
        arrived: (b, l) number of slots of the memory that had arrived at each token, which sees no later ones; tokens
            after those are like the last. A `MemoryStream` is the same while it grows.
        window: with `arrived`, how many of the latest slots each token sees; None for all.
    """

    adapter_scale: float | Mapping[str, float]
    images: Tensor | None
    arrived: Tensor | None
    window: int | None


class AdaptedModel(HookedModel):
    """A host and its adapters; what `attach` returns. Other attributes are read, set and deleted on the host.

    A kind of host of its own subclasses it, says which models it `matches` and which `sites` they offer, and is
    registered with `register_host`. By default adapters act by hooks before and after the modules that the sites name.

    Args:
        host: the frozen model.
        require_memory: calls without a memory raise instead of giving the host's own answer.
    """

    # Whether it may be attached without an adapter.
    attaches_bare: ClassVar[bool] = False
    # Keywords of a call that belong to the memory given beside them.
    memory_keywords: ClassVar[tuple[str, ...]] = ("adapter_scale",)
    # Whether its output has `logits` of the next token.
    predicts_tokens: ClassVar[bool] = False
    # The class of transformers that loads such a host by name.
    auto_class: ClassVar[str] = ""

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__(host)
        self.__class__ = shown_as(self, host)
        self.require_memory = require_memory
        self._keywords_of_host = keywords_of(host)

    # Kinds of hosts ----------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return True if a model is of this kind."""

    def example_batch(self, generator: torch.Generator, config: AdapterConfig, rows: int) -> dict[str, Tensor]:
        """Return a random batch of arguments of the host, without a memory; for the doctor and the shared tests."""
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

    # Memory --------------------------------------------------------------------------------------------------------

    def prepare(self, memory: object) -> Any:
        """Check a memory and cache what the adapters compute of it, for many calls; give the result as `memory`.

        Args:
            memory: one for all active adapters, or one by adapter name.

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
        shared: list[tuple[object, object]] = []  # no ids: a compiler would take each for a constant
        adapters: Mapping[str, AdapterLayers] = self.adapters._modules  # type: ignore[assignment]
        for name, one in memory.items():
            adapter = adapters.get(name) or self.adapter(name)
            before = next((result for other, result in shared if other is one), one)
            bound[name] = adapter.bind(before, self.host)
            shared.append((one, bound[name].shared))
        return bound

    def make_call(
        self, memory: object, adapter_scale: float | Mapping[str, float] = 1.0, **options: Any
    ) -> Call | None:
        """Return the call of a memory, or None without one."""
        self.check_attached()
        if memory is None:
            scale_by_adapter(adapter_scale, ())
            self.check_not_required()
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

    def set_options(self, call: Call | None) -> None:
        """Set the options of `condition` that only some kinds of hosts take."""

    def check_keywords(self, kwargs: Keywords) -> None:
        """Refuse near misses of the keywords that belong to a memory."""
        unnamed = [name for name in kwargs if name not in self._keywords_of_host]
        if unnamed:
            check_keywords(self.host, self.memory_keywords, unnamed)

    def options_of(self, kwargs: Arguments) -> Arguments:
        """Take the keywords that belong to a memory out of those of a call; refuse near misses of them."""
        self.check_keywords(kwargs)
        return {name: kwargs.pop(name) for name in self.memory_keywords if name in kwargs}

    @contextlib.contextmanager
    def condition(self, memory: object, **options: Unpack[CallOptions]) -> Iterator[Self]:
        """Give every call of the host inside the block this memory; None for no memory.

        Args:
            memory: (b, m, e), one for all active adapters, or one by adapter name.
            options: `CallOptions`: `adapter_scale`; of language models also `images`, `arrived` and `window`.

        Raises:
            ShapeError: a memory that does not fit.
            ConfigError: an adapter_scale of an adapter that reads no memory.
            NonFiniteError: NaN or infinity in a slot that may be attended to.
            ConditionError: a generator opens the block.
        """
        keywords: Arguments = {**options}
        call = self.make_call(memory, **keywords)
        with prepared_for_graphs(call), self.open_blocks.conditioned(call, is_condition=True):
            yield self

    def forward(self, *args: Any, memory: object = None, **kwargs: Any) -> Any:
        """Call the host with a memory; returns what the host returns.

        Args:
            args: the host's own.
            memory: (b, m, e), one row for each row of the batch; one for all adapters or one by adapter name. None: the
                memory of the surrounding `condition` block, or the host's own output. For a `ChunkedAdapter` also a
                function that finds the neighbours of chunks, for a `ComposedAdapter` an `AugmentingModel`.
            kwargs: the host's own, and the options of `condition`.

        Raises:
            ConfigError: a keyword that is a near miss of ours.
        """
        options = self.options_of(kwargs) if kwargs else {}
        if memory is None:
            check_unused(**options)
            return self.host(*args, **kwargs)
        with self.open_blocks.conditioned(self.make_call(memory, **options)):
            return self.host(*args, **kwargs)

    def calibrate(self, *args: Any, memory: object, **kwargs: Any) -> None:
        """Calibrate fresh gated adapters by a batch of the training data: mean and spread of what each block reads.

        Only tokens that attend to the memory count. The adapter is still exactly nothing. `training.train` and the
        `AdapterTrainer` do this by their first batch; call it yourself before a loop of your own.

        Args:
            args: those of the host.
            memory: as in `forward`.
            kwargs: those of `forward`.

        Raises:
            ConditionError: no adapter is fresh and has gated blocks, or fewer than two tokens attend to the memory.

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
                "calibrate measures a fresh adapter of gated blocks, and none with gates at 0 is attached"
            )
        with calibrating(self):
            self(*args, memory=memory, **kwargs)
        if missed := [one.name for one in fresh if not one.config.layout.calibrated]:
            raise ConditionError(f"adapters {missed} were not calibrated: fewer than two tokens attended to a memory")

    @contextlib.contextmanager
    def disable_adapter(self, names: str | Sequence[str] | None = None) -> Iterator[Self]:
        """Inside the block these adapters do not exist, whatever memory a call gives.

        Args:
            names: of the adapters; all by default.

        Raises:
            AttachError: a name that is not attached.
            ConditionError: a generator opens the block.
        """
        off = set(self.adapters) if names is None else {names} if isinstance(names, str) else set(names)
        for name in off:
            self.adapter(name)
        with self.open_blocks.without(off, everything=off == set(self.adapters)):
            yield self

    def check_attached(self) -> None:
        """Refuse to act on a host from which these adapters were unloaded."""
        if self.host.__dict__.get(MARK) is not self:
            raise ConditionError("the adapters were unloaded from this host and reach it no longer: attach again")

    def check_not_required(self) -> None:
        """Refuse a call without a memory, where one is required."""
        if self.require_memory:
            raise ConditionError("this host was attached with require_memory=True and no memory was given")

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
