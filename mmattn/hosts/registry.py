"""The kinds of hosts there are: ours, and those of packages that were imported."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from mmattn.errors import AttachError, ConfigError

Kind = TypeVar("Kind", bound=type)

_KINDS: dict[str, Any] = {}


def register_host(host: Kind) -> Kind:
    """Make a kind of host known, so that `attach` and `load` put adapters on it.

    Kinds registered later are asked first whether a model is theirs.

    Args:
        host: a subclass of `AdaptedModel` with `kind`, `positions`, `matches` and `sites`.

    Returns:
        the class, so that this is a decorator.

    Raises:
        ConfigError: something is missing, or another class has this kind.
    """
    cls: Any = host
    lacks = [name for name in ("kind", "positions", "matches", "sites") if not getattr(cls, name, None)]
    if lacks:
        raise ConfigError(f"{cls.__name__} cannot be registered as a host: it lacks {lacks}")
    known = _KINDS.get(cls.kind)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(
            f"{cls.__module__}.{cls.__name__} has the kind {cls.kind!r}, which {known.__module__}.{known.__name__} has "
            "already: give it another one"
        )
    _KINDS[cls.kind] = cls
    return host


def host_kind(model: nn.Module) -> Any:
    """The kind of host that a model is: the last registered one that matches it.

    Raises:
        AttachError: none does.
    """
    for kind in reversed(_KINDS.values()):
        if kind.matches(model):
            return kind
    raise AttachError(
        f"no registered kind of host matches {type(model).__name__} (registered: {', '.join(_KINDS)}): subclass "
        "mmattn.hosts.AdaptedModel for it and decorate it with @mmattn.register_host"
    )


def host_kinds() -> dict[str, Any]:
    """Every kind registered so far, by name."""
    return dict(_KINDS)
