"""The kinds of hosts: built-in ones, and those of imported packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from mmattn.errors import AttachError, ConfigError
from mmattn.hosts.diffusion.heads import is_of_diffusers
from mmattn.lazy import Registry

Kind = TypeVar("Kind", bound=type)

_KINDS = Registry(
    "the host kind",
    {
        "causal_lm": "mmattn.hosts.causal_lm.model",
        "diffusion_transformer": "mmattn.hosts.diffusion.transformer",
        "unet": "mmattn.hosts.diffusion.unet",
        "encoder": "mmattn.hosts.encoder",
        "encoder_decoder": "mmattn.hosts.encoder_decoder",
    },
)


def register_host(host: Kind) -> Kind:
    """Register a class of hosts, so that `attach` and `load` use it; a class decorator.

    For a model, kinds that were registered later are tried first.

    Args:
        host: a subclass of `AdaptedModel` with `kind`, `positions`, `matches` and `sites`.

    Returns:
        The class.

    Raises:
        ConfigError: an attribute is missing, or another class has this kind.
    """
    cls: Any = host
    lacks = [name for name in ("kind", "positions", "matches", "sites") if not getattr(cls, name, None)]
    if lacks:
        raise ConfigError(f"{cls.__name__} cannot be registered as a host: it lacks {lacks}")
    _KINDS.add(cls.kind, cls)
    return host


def host_kind(model: nn.Module) -> Any:
    """Return the host class for a model: the last registered one that matches it."""
    config = getattr(model, "config", None)
    possible = set(_KINDS) - (set() if is_of_diffusers(model) else {"diffusion_transformer", "unet"})
    if not getattr(config, "is_encoder_decoder", False):
        possible.discard("encoder_decoder")
    # Kinds that are ruled out are not imported.
    for name in reversed(list(_KINDS)):
        if name in possible and _KINDS[name].matches(model):
            return _KINDS[name]
    raise AttachError(
        f"no registered kind of host matches {type(model).__name__} (registered: {', '.join(_KINDS)}): subclass "
        "mmattn.hosts.AdaptedModel for it and decorate it with @mmattn.register_host"
    )


def host_kinds() -> Mapping[str, Any]:
    """Return the registered host classes by kind."""
    return _KINDS
