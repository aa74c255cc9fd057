"""The kinds of adapters by their name in `adapter_config.json`: ours, and those of packages that were imported."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from mmattn.adapters.protocols import POSITIONS
from mmattn.errors import ConfigError

Kind = TypeVar("Kind", bound=type)

_KINDS: dict[str, Any] = {}


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
            f"{cls.__name__} cannot be registered as an adapter: it must be a frozen dataclass with kind, positions, "
            f"sites, build and example_memory (lacks {lacks or 'none of them'}); put @register_adapter above "
            "@dataclass(frozen=True)"
        )
    kind = cls.kind
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ConfigError(f"{cls.__name__}.kind must be a name such as 'gated', got {kind!r}")
    if set(cls.positions) - set(POSITIONS) or not cls.positions:
        raise ConfigError(f"{cls.__name__}.positions must be some of {POSITIONS}, got {cls.positions!r}")
    known = _KINDS.get(kind)
    # A notebook cell run again defines the same class anew.
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(
            f"{cls.__module__}.{cls.__name__} has the kind {kind!r}, which {known.__module__}.{known.__name__} has "
            "already: give it another one"
        )
    _KINDS[kind] = cls
    return adapter


def adapter_kinds() -> dict[str, Any]:
    """Every kind registered so far, by name."""
    return dict(_KINDS)


def is_adapter(value: Any) -> bool:
    """Whether this is the settings of a registered kind."""
    return any(isinstance(value, kind) for kind in _KINDS.values())


def kinds_at(positions: tuple[str, ...]) -> str:
    """The names of the classes that act at one of these positions, as messages list them."""
    fitting = [kind.__name__ for kind in _KINDS.values() if set(kind.positions) & set(positions)]
    return ", ".join(fitting) or "none"
