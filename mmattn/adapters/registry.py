"""The kinds of adapters by their name in `adapter_config.json`: ours, and those of packages that were imported."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from mmattn.adapters.protocols import POSITIONS
from mmattn.errors import ConfigError

Kind = TypeVar("Kind", bound=type)

_KINDS: dict[str, type] = {}


def register_adapter(adapter: Kind) -> Kind:
    """Make a kind of adapter known: it can be attached, saved, and loaded again once its module is imported.

    Args:
        adapter: a frozen dataclass with what `mmattn.adapters.protocols.AdapterConfig` asks for.

    Returns:
        the class, so that this is a decorator.

    Raises:
        ConfigError: something is missing, or another class has this kind.
    """
    lacks = [name for name in ("kind", "positions", "sites", "build", "example_memory") if not hasattr(adapter, name)]
    if not dataclasses.is_dataclass(adapter) or not adapter.__dataclass_params__.frozen or lacks:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{adapter.__name__} cannot be registered as an adapter: it must be a frozen dataclass with kind, positions, "
            f"sites, build and example_memory (lacks {lacks or 'none of them'}); put @register_adapter above "
            "@dataclass(frozen=True)"
        )
    kind = adapter.kind  # type: ignore[attr-defined]
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ConfigError(f"{adapter.__name__}.kind must be a name such as 'gated', got {kind!r}")
    strange = set(adapter.positions) - set(POSITIONS)  # type: ignore[attr-defined]
    if strange or not adapter.positions:  # type: ignore[attr-defined]
        raise ConfigError(f"{adapter.__name__}.positions must be some of {POSITIONS}, got {adapter.positions!r}")  # type: ignore[attr-defined]
    known = _KINDS.get(kind)
    # A notebook cell run again defines the same class anew.
    if known is not None and (known.__module__, known.__qualname__) != (adapter.__module__, adapter.__qualname__):
        raise ConfigError(
            f"{adapter.__module__}.{adapter.__name__} has the kind {kind!r}, which {known.__module__}.{known.__name__} has "
            "already: give it another one"
        )
    _KINDS[kind] = adapter
    return adapter


def adapter_kinds() -> dict[str, type]:
    """Every kind registered so far, by name."""
    return dict(_KINDS)


def is_adapter(value: Any) -> bool:
    """Whether this is the settings of a registered kind."""
    return any(isinstance(value, kind) for kind in _KINDS.values())


def kinds_at(positions: tuple[str, ...]) -> str:
    """The names of the classes that act at one of these positions, as messages list them."""
    fitting = [kind.__name__ for kind in _KINDS.values() if set(kind.positions) & set(positions)]  # type: ignore[attr-defined]
    return ", ".join(fitting) or "none"
