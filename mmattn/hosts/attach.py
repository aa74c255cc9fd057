"""`attach`: an adapter on a frozen host, which is of one of the registered kinds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from mmattn.adapters.protocols import AdapterConfig
from mmattn.errors import AttachError, ConfigError
from mmattn.hosts.attachment import check_host, outside_modes
from mmattn.hosts.diffusion.heads import is_of_diffusers
from mmattn.hosts.interop.quantised import stored
from mmattn.hosts.model import AdaptedModel, adapted
from mmattn.lazy import Registry

Kind = TypeVar("Kind", bound=type[AdaptedModel])

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


def attach(
    host: nn.Module,
    adapter: AdapterConfig | None = None,
    name: str = "default",
    *,
    path: str | None = None,
    require_memory: bool = False,
) -> AdaptedModel:
    """Put an adapter on a frozen host; the host's answers stay bit for bit what they were until it is trained.

    Args:
        host: any causal language model, encoder–decoder or encoder of transformers, any UNet with cross-attention or
            diffusion transformer of diffusers, a model of a kind that was registered with
            `mmattn.hosts.register_host`, or what `attach` returned for it.
        adapter: its settings: a `GatedAdapter` for a model of transformers, for a causal language model also a
            `ChunkedAdapter` or `ComposedAdapter`, a `DecoupledAdapter` for a model of diffusers, or a kind of your own.
            A model of diffusers may go without: its own text can go through the core, see `AdaptedUNet.use_core`.
        name: to switch, combine and save it by.
        path: dotted name of the list of layers in a model of transformers, if it cannot be found.
        require_memory: calls without a memory raise instead of giving the host's own answer.

    Returns:
        the `AdaptedModel` of the host's kind: `AdaptedCausalLM`, `AdaptedEncoder`, `AdaptedUNet`, …

    Raises:
        AttachError: the name is taken or no plain name, the layers do not exist, the adapter is for another kind of
            host, or an option does not apply here.
        ConditionError: the host is compiled, has no weights, its 4-bit weights were laid out anew by an earlier call,
            or memory would not reach a layer. Nothing is changed then.
    """
    with outside_modes():
        model = adapted_model(host, path, require_memory)
    if adapter is not None or not model.attaches_bare:
        with stored(model.host):
            model.add_adapter(name, adapter)
    if adapted(model.host) is None:
        model.join()
    return model


def adapted_model(host: nn.Module, path: str | None, require_memory: bool = False) -> AdaptedModel:
    """Return the adapted model of a host, or a new one that does not change the host before `join`."""
    if isinstance(host, AdaptedModel):
        host = host.host
    model = adapted(host) if isinstance(host, nn.Module) else None
    if model is not None:
        decided = getattr(model, "path", None)
        if path is not None and path != decided:
            raise AttachError(f"path={path!r} was given, and the first attach decided path={decided!r}: unload() first")
        if require_memory and not model.require_memory:
            raise AttachError(
                "require_memory=True was given, and the first attach decided False: set model.require_memory"
            )
        return model
    kind = host_kind(check_host(host))
    options: dict[str, Any] = {"require_memory": require_memory}
    if path is not None:
        if "path" not in inspect.signature(kind).parameters:
            raise AttachError(
                f"path={path!r} names a list of layers, and {type(host).__name__} is a host of kind "
                f"{kind.kind!r}, which takes none: leave it out"
            )
        options["path"] = path
    return kind(host, **options)


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
    lacks = [name for name in ("kind", "positions", "matches", "sites") if not getattr(host, name, None)]
    if lacks:
        raise ConfigError(f"{host.__name__} cannot be registered as a host: it lacks {lacks}")
    _KINDS.add(host.kind, host)
    return host


def host_kind(model: nn.Module) -> type[AdaptedModel]:
    """Return the host class for a model: the last registered one that matches it."""
    config = getattr(model, "config", None)
    possible = set(_KINDS) - (set() if is_of_diffusers(model) else {"diffusion_transformer", "unet"})
    if not getattr(config, "is_encoder_decoder", False):
        possible.discard("encoder_decoder")
    # Kinds that are ruled out are not imported.
    for name in reversed(list(_KINDS)):
        if name in possible and (kind := _KINDS[name]).matches(model):
            return kind
    raise AttachError(
        f"no registered kind of host matches {type(model).__name__} (registered: {', '.join(_KINDS)}): subclass "
        "mmattn.hosts.AdaptedModel for it and decorate it with @mmattn.register_host"
    )


def host_kinds() -> Mapping[str, type[AdaptedModel]]:
    """Return the registered host classes by kind."""
    return _KINDS
