"""Settings that the methods share: base classes, default sizes, the layers of an adapter; and the registry of kinds."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from mmattn.adapters.protocols import POSITIONS, AdapterConfig, Host, Site
from mmattn.errors import AttachError, ConfigError, check_bool, check_int
from mmattn.lazy import Registry
from mmattn.memory import Memory

#: An adapter acts at every n-th layer if neither `every` nor `layers` is given and the host has so many.
EVERY = 4
MAX_WIDTH = 512
#: A norm takes two numbers from a vector, its mean and its length. Of a narrow one that is most of what it says.
NARROW = 12


@dataclass(frozen=True)
class VectorAdapter(ABC):
    """Base of the settings of adapters that read vectors.

    Args:
        memory_dim: e, width of the memory.
    """

    memory_dim: int

    kind: ClassVar[str]
    positions: ClassVar[tuple[str, ...]]
    example_call: ClassVar[str]

    def __post_init__(self) -> None:
        check_int("memory_dim", self.memory_dim, at_most=65536)

    def sites(self, host: Host) -> list[Site]:
        """Return every site of the adapter's position."""
        return host.sites(self.positions[0])

    @abstractmethod
    def build(self, sites: Sequence[Site]) -> nn.Module:
        """Return the trainable part for these sites, an `AdapterLayers`."""

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory (rows, 5, e), some slots masked."""
        return random_memory(generator, rows, self.memory_dim)


def settle(config: object, **values: object) -> None:
    """Set fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


def settle_nested(config: object, name: str, kind: type, optional: bool = False) -> None:
    """Turn a field given as a mapping (of a YAML file) into its dataclass."""
    value = getattr(config, name)
    if isinstance(value, dict):
        try:
            value = kind(**value)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from error
    if not isinstance(value, kind) and not (optional and value is None):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")
    settle(config, **{name: value})


def default_norm(norm: bool | None, e: int) -> bool:
    """Return True if vectors of width e go through a norm: by default wide ones."""
    if norm is None:
        return e >= NARROW
    check_bool("memory_norm", norm)
    return norm


def default_heads(d: int, e: int, num_heads: int | None = None, head_dim: int | None = None) -> tuple[int, int]:
    """Number h and width k of the heads of a cross-attention, whose four matrices hold about 4 d² weights at most.

    That is what an attention of the host itself holds, so that an adapter is small beside it whatever the memory's
    width; at most 8 heads of 64.

    >>> default_heads(768, 768), default_heads(128, 128), default_heads(128, 1280)
    ((8, 64), (8, 16), (1, 16))
    """
    width = min(MAX_WIDTH, d, 2 * d * d // (d + e))
    h = max(1, min(8, width // (head_dim or 16))) if num_heads is None else num_heads
    k = max(8, min(64, width // h // 8 * 8)) if head_dim is None else head_dim
    return h, k


@dataclass(frozen=True)
class LayeredAdapter(VectorAdapter):
    """Base of the settings of adapters that act at some layers.

    Args:
        every: act at every n-th host layer (layers n-1, 2n-1, …); by default 4, or the depth of a host with fewer.
        layers: or the explicit list of host layers, counted from 0.

    The other is that of `VectorAdapter`.
    """

    every: int | None = None
    layers: tuple[int, ...] | None = None

    default_every: ClassVar[int] = EVERY

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = check_layers("layers", self.layers)
        if self.every is not None and layers is not None:
            raise ConfigError(f"give every or layers, not both; got every={self.every} and layers={list(layers)}")
        if self.every is not None:
            check_int("every", self.every, at_most=1024)
        if layers is not None and len(set(layers)) != len(layers):
            raise ConfigError(f"layers must differ from each other, got {list(layers)}")
        settle(self, layers=None if layers is None else tuple(sorted(layers)))

    def offered(self, host: Host) -> list[Site]:
        """Return the sites among which `layers` and `every` choose."""
        return host.sites(self.positions[0])

    def sites(self, host: Host) -> list[Site]:
        """Return the sites that `layers` or `every` names."""
        offered, every = self.offered(host), self.every
        depth = len(offered)
        if self.layers is not None:
            if self.layers[-1] >= depth:
                raise AttachError(f"layers {list(self.layers)} were asked for and the host has layers 0 to {depth - 1}")
            return [offered[layer] for layer in self.layers]
        if every is not None and every > depth:
            raise AttachError(f"every={every} was asked for and the host has only {depth} layers: choose at most that")
        every = min(self.default_every, depth) if every is None else every
        return offered[every - 1 :: every]


def check_layers(name: str, layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return a list of layers as a tuple, in its order."""
    if layers is None:
        return None
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ConfigError(f"{name} must be a list of layers counted from 0, got {layers!r}")
    return tuple(check_int(name, layer, at_least=0, at_most=4095) for layer in layers)


def settle_augmenting_layers(config: object, layers: Sequence[int] | None, others: Sequence[int] | None) -> None:
    """Put `augmenting_layers` in the order of the host's layers, of which these are as they were given."""
    host_layers, augmenting = check_layers("layers", layers), check_layers("augmenting_layers", others)
    if host_layers is not None and augmenting is not None:
        if len(host_layers) != len(augmenting):
            raise ConfigError(
                f"augmenting_layers must name one layer for each of layers {list(host_layers)}, got {others}"
            )
        augmenting = tuple(other for _, other in sorted(zip(host_layers, augmenting, strict=True)))
    settle(config, augmenting_layers=augmenting)


def augmenting_layers_of(others: Sequence[int] | None, layers: Sequence[int]) -> dict[int, int]:
    """Return the layer of an augmenting model for each host layer; by default that of the same number."""
    others = layers if others is None else others
    if len(others) != len(layers):
        raise AttachError(
            f"the adapter is put at layers {list(layers)} of the host and augmenting_layers names {list(others)}: name "
            "one for each"
        )
    return dict(zip(layers, others, strict=True))


def random_memory(
    generator: torch.Generator, rows: int, dim: int, segments: int = 1, scores: bool = False, slots: int = 5
) -> Memory:
    """Return a random memory (rows, segments · slots, dim) with padding in some rows.

    >>> random_memory(torch.Generator().manual_seed(0), rows=2, dim=7).lengths
    [5, 3]
    """
    m = segments * slots
    real = torch.tensor([slots, slots - 2, slots - 1])[torch.arange(rows) % 3]
    mask = torch.arange(m) % slots < real[:, None]
    owner = torch.arange(segments).repeat_interleave(slots).expand(rows, m) if segments > 1 else None
    tokens = torch.randn(rows, m, dim, generator=generator, device=generator.device)
    return Memory(
        tokens, mask, owner, torch.randn(rows, m, generator=generator, device=generator.device) if scores else None
    )


Kind = TypeVar("Kind", bound=type)

_METHODS = ("chunked", "composed", "decoupled", "fused_cache", "gated", "inserted", "joined", "passages", "prefix")
_KINDS = Registry(
    "the adapter kind",
    {kind: f"mmattn.adapters.{kind}" for kind in _METHODS} | {"joint_decoupled": "mmattn.adapters.decoupled"},
)


def register_adapter(adapter: Kind) -> Kind:
    """Make a kind of adapter known: it can be attached, saved, and loaded again once its module is imported.

    Args:
        adapter: a frozen dataclass with what `mmattn.adapters.protocols.AdapterConfig` asks for.

    Returns:
        the class, so that this is a decorator.

    Raises:
        ConfigError: something is missing, or another class has this kind.
    """
    cls: Any = adapter
    lacks = [name for name in ("kind", "positions", "sites", "build", "example_memory") if not hasattr(cls, name)]
    if not dataclasses.is_dataclass(adapter) or not cls.__dataclass_params__.frozen or lacks:
        raise ConfigError(
            f"{cls.__name__} must be a frozen dataclass with kind, positions, sites, build and example_memory (lacks "
            f"{lacks or 'none of them'}); put @register_adapter above @dataclass(frozen=True)"
        )
    kind = cls.kind
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ConfigError(f"{cls.__name__}.kind must be a name such as 'gated', got {kind!r}")
    if set(cls.positions) - set(POSITIONS) or not cls.positions:
        raise ConfigError(f"{cls.__name__}.positions must be some of {POSITIONS}, got {cls.positions!r}")
    _KINDS.add(kind, cls)
    return adapter


def adapter_kinds() -> Mapping[str, type[AdapterConfig]]:
    """Return the registered adapter classes by kind."""
    return _KINDS


def is_adapter(value: object) -> bool:
    """Return True for an instance of a registered adapter class."""
    return isinstance(value, tuple(_KINDS.loaded.values()))


def kinds_at(positions: tuple[str, ...]) -> str:
    """Return the class names of the kinds that act at one of these positions, for messages."""
    fitting = [kind.__name__ for kind in _KINDS.values() if set(kind.positions) & set(positions)]
    return ", ".join(fitting) or "none"
