"""The registry of adapters: by kind the settings, and what is trained on a host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import POSITIONS, AdapterConfig, Site
from mmattn.errors import ConfigError
from mmattn.lazy import Registry

_METHODS = ("chunked", "composed", "decoupled", "fused_cache", "gated", "inserted", "joined", "passages", "prefix")
_KINDS = Registry(
    "the adapter kind",
    {kind: f"mmattn.adapters.{kind}" for kind in _METHODS} | {"joint_decoupled": "mmattn.adapters.decoupled"},
)


#: By settings class, the trainable part of an adapter of that kind on one host.
_LAYERS: dict[type, type[AdapterLayers]] = {}


def register_adapter(config: type, layers: type[AdapterLayers]) -> None:
    """Make a kind of adapter known: it can be attached, saved, and loaded again once its module is imported.

    Args:
        config: the settings, a frozen dataclass with what `mmattn.extend.AdapterConfig` asks for.
        layers: a subclass of `mmattn.extend.AdapterLayers`, made from the settings and the sites of one host.

    Raises:
        ConfigError: something is missing, or another class has this kind.

    >>> from mmattn.adapters.gated import GatedAdapter, GatedLayers
    >>> register_adapter(GatedAdapter, GatedLayers)
    """
    cls: Any = config
    lacks = [name for name in ("kind", "positions", "sites", "example_memory") if not hasattr(cls, name)]
    if not dataclasses.is_dataclass(config) or not cls.__dataclass_params__.frozen or lacks:
        raise ConfigError(
            f"{cls.__name__} must be a frozen dataclass with kind, positions, sites and example_memory (lacks "
            f"{lacks or 'none of them'}): decorate it with @dataclass(frozen=True)"
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
