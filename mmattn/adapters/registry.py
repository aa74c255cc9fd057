"""The kinds of adapters by their name in `adapter_config.json`: built-in ones, and those of imported packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from mmattn.adapters.protocols import POSITIONS
from mmattn.errors import ConfigError
from mmattn.lazy import Registry

Kind = TypeVar("Kind", bound=type)

_BUILT_IN = ("chunked", "composed", "decoupled", "fused_cache", "gated", "inserted", "joined", "passages", "prefix")
_KINDS = Registry(
    "the adapter kind",
    {kind: f"mmattn.adapters.{kind}.adapter" for kind in _BUILT_IN}
    | {"joint_decoupled": "mmattn.adapters.decoupled.joint"},
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


def adapter_kinds() -> Mapping[str, Any]:
    """Return the registered adapter classes by kind."""
    return _KINDS


def is_adapter(value: object) -> bool:
    """Return True for an instance of a registered adapter class."""
    return isinstance(value, tuple(_KINDS.loaded.values()))


def kinds_at(positions: tuple[str, ...]) -> str:
    """Return the class names of the kinds that act at one of these positions, for messages."""
    fitting = [kind.__name__ for kind in _KINDS.values() if set(kind.positions) & set(positions)]
    return ", ".join(fitting) or "none"
