"""Check from a config alone whether a model can be a host: `attach`, with weights that have no values.

Tensors without values (`torch._subclasses.FakeTensorMode`) have shapes and take no memory, so a model of any size takes
seconds. Only `attach` itself checks that memory reaches the output.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from mmattn.adapters.decoupled import DecoupledAdapter
from mmattn.adapters.gated import GatedAdapter
from mmattn.adapters.protocols import Site
from mmattn.errors import AdapterFileError, ConfigError, MmattnError
from mmattn.hosts.diffusion.loading import empty_model, read_diffusers_config
from mmattn.hosts.registry import host_kind

_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
#: Where a config names no class.
_AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModel")


@dataclass(frozen=True)
class AttachReport:
    """The result of `attach_check`.

    Attributes:
        host: name of its class.
        kind: registered kind of host; "" if none fits.
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
    config: Any,
    *,
    memory_dim: int = 768,
    every: int | None = None,
    where: str | None = None,
    path: str | None = None,
) -> AttachReport:
    """Check from a config whether a model can be a host, and where adapters would act.

    Args:
        config: of transformers, for a `GatedAdapter`; or of a model of diffusers, a mapping, for a `DecoupledAdapter`
            in every block.
        memory_dim: e, width of the memory.
        every: a block at every n-th layer; 4 by default, less in smaller models.
        where: as in `GatedAdapter`.
        path: as in `attach`.

    Raises:
        AdapterFileError: neither transformers nor diffusers makes a model of this config.
        ConfigError: `every`, `where` or `path` for a model of diffusers.

    >>> from transformers import LlamaConfig
    >>> report = attach_check(LlamaConfig(num_hidden_layers=80, hidden_size=8192))
    >>> report.ok, report.stacks
    (True, (('', 'model.layers', 80, 8192),))
    """
    denoises = isinstance(config, Mapping)
    if denoises and any(option is not None for option in (every, where, path)):
        raise ConfigError("every=, where= and path= are for models of transformers; in diffusers' every block has one")
    host = empty_model(config) if denoises else model_of(config)
    name, kind = type(host).__name__, ""
    stacks: tuple[tuple[str, str, int, int], ...] = ()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _without_values(host)
            cls: Any = host_kind(host)
            kind = cls.kind
            model = cls(host) if path is None else cls(host, path)
            stacks = _stacks(model.sites("inside" if denoises else "after"))
            adapter: Any = DecoupledAdapter(memory_dim)
            if not denoises:
                adapter = GatedAdapter(memory_dim=memory_dim, every=every or min(4, stacks[0][2]), where=where)
            built = adapter.build(adapter.sites(model))
            model.check_adapter(built)
    except MmattnError as error:
        outcome = "undecided" if isinstance(error.__cause__, _DEPENDS_ON_VALUES) else "refused"
        return AttachReport(name, kind, stacks, **{outcome: str(error)})  # type: ignore[arg-type]
    trained = sum(parameter.numel() for parameter in built.parameters())
    whole = sum(parameter.numel() for parameter in host.parameters())
    return AttachReport(name, kind, stacks, tuple(built.layers), (trained, whole))


def model_of(config: Any) -> nn.Module:
    """Make the model of a config on the meta device."""
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    tried = ""
    with torch.device("meta"):
        for kind in [one for one in named if one is not None]:
            return _make(kind._from_config, config)
        for auto in _AUTO:
            try:
                return _make(getattr(transformers, auto).from_config, config)
            except AdapterFileError as error:
                tried = tried or str(error)
    raise AdapterFileError(tried)


def _make(make: Any, config: Any) -> nn.Module:
    try:
        model: nn.Module = make(config)
    except Exception as error:
        raise AdapterFileError(f"transformers makes no model of this {type(config).__name__}: {error}") from error
    return model.eval()


def _without_values(host: nn.Module) -> None:
    """Bring tensors from the meta device to the CPU; inside a `FakeTensorMode` they still have no values."""
    here: dict[Any, Any] = {}  # tied weights stay one
    for module in host.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if tensor not in here:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    here[tensor] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = here[tensor]


def read_config(name: str | PathLike[str]) -> Any:
    """The config of transformers or diffusers under a name on the hub, or in a folder or file."""
    from transformers import AutoConfig

    here = os.path.exists(name)
    denoiser = read_diffusers_config(name) if here else None
    if denoiser is not None:
        return denoiser
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        denoiser = None if here else read_diffusers_config(name)
        if denoiser is not None:
            return denoiser
        said = " ".join(str(error).split())
        raise AdapterFileError(f"{str(name)!r} is no config of transformers or diffusers: {said}") from error


def _stacks(sites: Sequence[Site]) -> tuple[tuple[str, str, int, int], ...]:
    """Return part, name, number of layers and width of each list of layers."""
    stacks: Counter[tuple[str, str, int]] = Counter()
    for site in sites:
        inside = site.position == "inside"
        path = re.sub(r"\.\d+\b", ".*", site.module) if inside else site.module.rpartition(".")[0]
        stacks[site.part or "", path, site.width] += 1
    return tuple((part, path, count, width) for (part, path, width), count in stacks.items())
