"""`attach`: an adapter on a frozen host, which is of one of the registered kinds."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from mmattn.adapters.base import build_layers
from mmattn.adapters.gated import GatedAdapter
from mmattn.adapters.settings import AdapterConfig
from mmattn.errors import AdapterFileError, AttachError, ConfigError, MmattnError
from mmattn.hosts.attachment import check_host, outside_modes
from mmattn.hosts.diffusion.heads import is_of_diffusers
from mmattn.hosts.model import AdaptedModel, adapted
from mmattn.hosts.stored import stored
from mmattn.lazy import Registry
from mmattn.models.cache import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
    """Attach an adapter to a frozen host. Until it is trained, the host's answers stay bit for bit the same.

    Args:
        host: any causal language model, encoder–decoder or encoder of transformers; any UNet with cross-attention or
            diffusion transformer of diffusers; a model of a registered kind (`mmattn.hosts.register_host`); or an
            adapted model, for a further adapter.
        adapter: its settings, such as a `GatedAdapter` for a model of transformers, a `ChunkedAdapter` or
            `ComposedAdapter` for a causal language model, a `DecoupledAdapter` for a model of diffusers, or a
            registered kind. Optional for a model of diffusers, see `AdaptedUNet.use_core`.
        name: name of the adapter, to switch, combine and save it.
        path: dotted name of the list of layers in a model of transformers, if it cannot be found.
        require_memory: raise for a call without a memory, instead of returning the host's answer.

    Returns:
        The `AdaptedModel` for the host's kind: `AdaptedCausalLM`, `AdaptedEncoder`, `AdaptedUNet`, …

    Raises:
        AttachError: the name is taken or not a plain name, the layers do not exist, the adapter is for another kind of
            host, or an option does not apply to this host.
        ConditionError: the host is compiled, has no weights, an earlier call changed the layout of its 4-bit weights,
            or the memory would not reach a layer. The host is unchanged.
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
                f"path={path!r} names a list of layers, and {type(host).__name__}, a host of kind {kind.kind!r}, takes "
                "no path: leave it out"
            )
        options["path"] = path
    return kind(host, **options)


def register_host(host: Kind) -> Kind:
    """Register a class of hosts, so that `attach` and `load` use it; a class decorator.

    Kinds that were registered later are tried first.

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


# `attach` by a config alone -------------------------------------------------------------------------------------------

# Tensors without values (`torch._subclasses.FakeTensorMode`) have shapes and take no memory, so a model of any size
# takes seconds. Only `attach` itself checks that memory reaches the output.


_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
#: Where a config names no class.
_AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModel")


@dataclass(frozen=True)
class AttachReport:
    """The result of `attach_check`.

    Attributes:
        host: name of its class.
        kind: registered kind of host; "" if no kind matches.
        stacks: part ("" for a single list), dotted name, number of layers and width of each list of layers.
        layers: numbers of the layers with an adapter.
        parameters: number of trained parameters, and of the host's.
        refused: reason why the model cannot be a host, or None.
        undecided: reason why only `attach` can decide (its forward depends on values), or None.
    """

    host: str
    kind: str = ""
    stacks: tuple[tuple[str, str, int, int], ...] = ()
    layers: tuple[int, ...] = ()
    parameters: tuple[int, int] = (0, 0)
    refused: str | None = None
    undecided: str | None = None

    @property
    def ok(self) -> bool:
        """True unless the model is refused."""
        return self.refused is None

    def __str__(self) -> str:
        lines = [f"{self.host}: {f'a host of kind {self.kind!r}' if self.ok else 'no host'}"]
        for part, path, count, width in self.stacks:
            lines.append(f"  {part or 'layers'}: {path}, {count} of width {width}")
        if self.refused is not None:
            return "\n".join([*lines, f"  refused: {self.refused}"])
        if self.undecided is not None:
            return "\n".join([*lines, f"  undecided without weights: {self.undecided}"])
        trained, whole = self.parameters
        lines.append(f"  adapter at layers {list(self.layers)}: {trained:,} parameters beside the host's {whole:,}")
        return "\n".join(lines)


def attach_check(
    config: PreTrainedConfig,
    *,
    memory_dim: int = 768,
    every: int | None = None,
    where: str | None = None,
    path: str | None = None,
) -> AttachReport:
    """Check from a config whether a model can be a host, and where adapters would act.

    Args:
        config: a config of transformers.
        memory_dim: e, width of the memory.
        every: a block at every n-th layer; 4 by default, less for smaller models.
        where: as in `GatedAdapter`.
        path: as in `attach`.

    Raises:
        AdapterFileError: transformers has no model for this config.

    >>> from transformers import LlamaConfig
    >>> report = attach_check(LlamaConfig(num_hidden_layers=80, hidden_size=8192))
    >>> report.ok, report.stacks
    (True, (('', 'model.layers', 80, 8192),))
    """
    host = model_of(config)
    name, kind, whole = type(host).__name__, "", sum(parameter.numel() for parameter in host.parameters())
    stacks: tuple[tuple[str, str, int, int], ...] = ()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            host.to_empty(device="cpu")  # inside of this mode still without values
            kind = host_kind(host).kind
            model = adapted_model(host, path)
            sites = model.sites("after")
            lists = Counter((site.part or "", site.module.rpartition(".")[0], site.width) for site in sites)
            stacks = tuple((part, path, count, width) for (part, path, width), count in lists.items())
            adapter = GatedAdapter(memory_dim=memory_dim, every=every or min(4, stacks[0][2]), where=where)
            built = build_layers(adapter, adapter.sites(model))
            model.check_adapter(built)
    except MmattnError as error:
        outcome = "undecided" if isinstance(error.__cause__, _DEPENDS_ON_VALUES) else "refused"
        return AttachReport(name, kind, stacks, **{outcome: str(error)})  # type: ignore[arg-type]
    trained = sum(parameter.numel() for parameter in built.parameters())
    return AttachReport(name, kind, stacks, built.layers, (trained, whole))


def model_of(config: PreTrainedConfig) -> nn.Module:
    """Make the model of a config on the meta device."""
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    makers = [kind._from_config for kind in named if kind is not None][:1]
    first: Exception | None = None
    with torch.device("meta"):
        for make in makers or [getattr(transformers, auto).from_config for auto in _AUTO]:
            try:
                model: nn.Module = make(config)
                return model.eval()
            except Exception as error:
                first = first or error
    raise AdapterFileError(f"transformers makes no model of this {type(config).__name__}: {first}") from first


def read_config(name: str | PathLike[str]) -> PreTrainedConfig:
    """Return the config of transformers under a short name or a name on the hub, or in a folder or file."""
    from transformers import AutoConfig

    name = resolve(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        if isinstance(error, OSError) and not os.path.exists(name):
            raise AdapterFileError(
                f"the config of {str(name)!r} cannot be loaded: it is no folder, and the hub has no such model or "
                f"cannot be reached: {said}"
            ) from error
        raise AdapterFileError(f"{str(name)!r} is no config of transformers: {said}") from error
