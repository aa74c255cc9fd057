"""`AdapterLayers`, the trainable part of an adapter on one host; and the registries of kinds and of memory types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.projection import PreparedMemory, ProjectedMemory, Reader
from mmattn.adapters.protocols import POSITIONS, BoundMemory, Site, Traits
from mmattn.adapters.resampler import PerceiverResampler, Resampler
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import Keywords
from mmattn.errors import ConditionError, ConfigError, ShapeError
from mmattn.lazy import Registry
from mmattn.memory import Memory

#: By type, how a memory of it is bound to an adapter: from the memory, the `AdapterLayers` and the frozen host.
BINDERS: dict[type, Callable[..., BoundMemory]] = {}


def register_memory_type(kind: type, bind: Callable[..., BoundMemory]) -> None:
    """Make a type known besides vectors, so that any adapter that supports it takes its objects as `memory=`."""
    BINDERS[kind] = bind


#: What was computed of the last memory that each adapter was given without gradients: steps of a sampler and tokens are
#: given the same again.
_LAST: WeakKeyDictionary[nn.Module, PreparedMemory] = WeakKeyDictionary()


class AdapterLayers(Reader):
    """The trainable part of one adapter on one host.

    A new kind makes `blocks`, a `ModuleDict` from `str(site.layer)` to the block that `View.apply` calls, and says how
    a memory is read; `bind_memory` returns what the tokens of a call attend to.

    Args:
        config: the settings, an `AdapterConfig`.
        sites: where it acts.

    Attributes:
        traits: what hosts and the shared tests must know of the adapter.
        separable: its slots can be attended to in parts, so that a memory may be shared, streamed or searched.
    """

    traits = Traits()
    separable = False

    def __init__(self, config: AdapterConfig, sites: Sequence[Site]) -> None:
        super().__init__()
        self.config = config
        self.sites = tuple(sites)
        self.layers = tuple(site.layer for site in self.sites)
        self.position = self.sites[0].position
        self.places = [(layer, self.position) for layer in self.layers]
        self.name = "default"
        self.register_load_state_dict_pre_hook(_give_dimension)

    @property
    def adapter_config(self) -> AdapterConfig:
        """The settings, under the name of their entry in a state dict: torch's DCP looks up the name of every entry."""
        return self.config

    def _add_reader(self, norm: bool | None, resampler: Resampler | None = None) -> None:
        """Add the norm and the resampler of a memory, as the settings have them."""
        if norm:
            self.memory_norm = nn.LayerNorm(self.config.memory_dim)
        if resampler is not None:
            self.resampler = PerceiverResampler(resampler, self.config.memory_dim)
            # Its latents attend to each other beside the slots.
            self.traits = replace(self.traits, duplicates_matter=True)

    def bind(self, memory: object, host: nn.Module) -> BoundMemory:
        """Validate a memory given as `memory=` and bind it to this adapter, for one call.

        Args:
            memory: a `Memory`, a tensor (b, m, e), what `model.prepare` returned, or an object of a type registered by
                `register_memory_type`.
            host: the frozen model, for kinds whose memory must fit it.

        Raises:
            ShapeError: a memory that this adapter cannot read.
            NonFiniteError: NaN or infinity in a slot that may be attended to.
            ConditionError: a type of memory that this adapter does not support.
        """
        for kind in type(memory).__mro__:
            if kind in BINDERS:
                return BINDERS[kind](memory, self, host)
        return self.bind_memory(memory, host)

    def bind_memory(self, memory: object, host: nn.Module) -> BoundMemory:
        """Validate and bind a memory of the kind that this adapter reads; by default vectors."""
        return ProjectedMemory(self.prepare(memory), self)

    def prepare(self, memory: object) -> PreparedMemory:
        """Check vectors given as `memory=`, and return them as an object that caches keys and values for many calls.

        Raises:
            ShapeError: something else, or a memory that this adapter cannot read.
            NonFiniteError: NaN or infinity in a slot that may be attended to.
        """
        if isinstance(memory, PreparedMemory) and self in memory.checked_by:
            return memory
        # Nothing is cached while gradients are computed. A tensor may be a buffer whose edits torch does not count.
        keeps = isinstance(memory, Memory) and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        cached = _LAST.get(self) if keeps else None
        if cached is not None and cached.memory is memory:
            cached.memory.check_in_call()
            return cached
        if isinstance(memory, PreparedMemory):
            self.check_memory(memory.memory)
            prepared = memory
        elif isinstance(memory, (Memory, Tensor)):
            vectors = Memory(memory) if isinstance(memory, Tensor) else memory
            self.check_memory(vectors)
            vectors.check_in_call()
            prepared = PreparedMemory(vectors)
        else:
            hint = "; a function that finds neighbours is for a ChunkedAdapter" if callable(memory) else ""
            raise ShapeError(
                f"the memory of adapter {self.name!r} (kind {self.config.kind!r}) must be a Memory or a tensor "
                f"(b, m, e), got {type(memory).__name__}{hint}"
            )
        prepared.checked_by.add(self)
        if keeps:
            _LAST[self] = prepared
        return prepared

    def check_memory(self, memory: Memory) -> None:
        """Raise ShapeError unless this adapter can read a memory."""
        width = memory.tokens.shape[2]
        if width != self.config.memory_dim:
            raise ShapeError(
                f"adapter {self.name!r} was made for memory_dim={self.config.memory_dim}, got a memory of width "
                f"{width}: use the encoder it was trained with"
            )
        if self.score_bias and memory.scores is None:
            raise ShapeError(f"adapter {self.name!r} was made with score_bias=True and the memory has no scores")

    def why_whole(self) -> str | None:
        """Return why all slots must be read together, so that a memory cannot come in parts; None if they need not."""
        if not self.separable:
            return f"kind {self.config.kind!r}"
        return None if self.resampler is None else "its resampler mixes all slots"

    def check_parts(self, kind: str, instead: str) -> None:
        """Raise ConditionError unless the slots can be attended to in parts."""
        why = self.why_whole()
        if why is not None:
            raise ConditionError(f"adapter {self.name!r} reads no {kind} ({why}): give {instead}")

    def attach_to(self, host: Any) -> None:
        """Prove that this adapter reaches the output of an adapted model, or raise AttachError or ConditionError."""
        host.check_adapter(self)

    def initialise(self, host: Any) -> None:
        """Begin from weights of the adapted host, where the settings ask for it; called before the first training."""

    def slot_norm(self) -> nn.LayerNorm | None:
        """Return the norm that `read` applies to a slot, or None; ConditionError if it does more."""
        raise ConditionError(
            f"adapter {self.name!r} (kind {self.config.kind!r}) reads no memory that is searched, such as "
            "index.as_memory(): give a Memory, such as hits.memory() of a search"
        )

    def first_tokens(self, memory: Memory, batch: Keywords) -> Tensor | None:
        """Return the first token that may attend to each slot (b, m), the text's length for none; None for all."""
        counts = batch.get("arrived")
        if counts is None:
            return None
        return (counts.cpu()[:, None] <= torch.arange(memory.length)[:, None]).sum(2)

    def to_sites(self) -> None:
        """Move each block to the device of its site, and what reads the memory to the first one."""
        for site in self.sites:
            self.block(site.layer).to(site.device)
        for child in self.children():
            if child is not self.blocks:
                child.to(self.sites[0].device)


def _give_dimension(adapter: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Give gates of files that have them as plain numbers the dimension that FSDP2 shards by."""
    for name, parameter in adapter.named_parameters(prefix.removesuffix(".")):
        if name in state and not state[name].dim() and parameter.dim() == 1:
            state[name] = state[name][None]


_METHODS = ("chunked", "composed", "decoupled", "fused_cache", "gated", "inserted", "joined", "passages", "prefix")
_KINDS = Registry(
    "the adapter kind",
    {kind: f"mmattn.adapters.{kind}" for kind in _METHODS} | {"joint_decoupled": "mmattn.adapters.decoupled"},
)


#: By settings class, the trainable part of an adapter of that kind on one host.
_LAYERS: dict[type, type[AdapterLayers]] = {}


def register_adapter(config: type, layers: type[AdapterLayers]) -> None:
    """Register a kind of adapter, so that it can be attached, saved and loaded once its module is imported.

    Args:
        config: the settings, a subclass of `mmattn.extend.AdapterConfig` and frozen dataclass.
        layers: a subclass of `mmattn.extend.AdapterLayers`, made from the settings and the sites of one host.

    Raises:
        ConfigError: something is missing, or another class has this kind.

    >>> from mmattn.adapters.gated import GatedAdapter, GatedLayers
    >>> register_adapter(GatedAdapter, GatedLayers)
    """
    cls: Any = config
    frozen = dataclasses.is_dataclass(config) and cls.__dataclass_params__.frozen
    if not (frozen and issubclass(config, AdapterConfig) and hasattr(cls, "kind") and hasattr(cls, "positions")):
        raise ConfigError(
            f"{cls.__name__} must be a subclass of mmattn.extend.AdapterConfig with kind and positions: decorate it "
            "with @dataclass(frozen=True)"
        )
    kind = cls.kind
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ConfigError(f"{cls.__name__}.kind must be a name such as 'gated', got {kind!r}")
    if set(cls.positions) - set(POSITIONS) or not cls.positions:
        raise ConfigError(f"{cls.__name__}.positions must be some of {POSITIONS}, got {cls.positions!r}")
    if not (isinstance(layers, type) and issubclass(layers, AdapterLayers)):
        raise ConfigError(
            f"the layers of {cls.__name__} must be a subclass of mmattn.extend.AdapterLayers, got {layers!r}"
        )
    _KINDS.add(kind, cls)
    _LAYERS[cls] = layers


def build_layers(config: AdapterConfig, sites: Sequence[Site]) -> AdapterLayers:
    """Return the trainable part of an adapter with registered settings, for sites of one host."""
    return _LAYERS[type(config)](config, sites)


def adapter_kinds() -> Mapping[str, type[AdapterConfig]]:
    """Return the registered adapter classes by kind."""
    return _KINDS


def is_adapter(value: object) -> bool:
    """Return True for an instance of a registered adapter class."""
    return type(value) in _LAYERS


def kinds_at(positions: tuple[str, ...]) -> str:
    """Return the class names of the kinds that act at one of these positions, for messages."""
    fitting = [kind.__name__ for kind in _KINDS.values() if set(kind.positions) & set(positions)]
    return ", ".join(fitting) or "none"
