"""Check from a config alone whether a model can be a host: `attach`, with weights that have no values.

Tensors without values (`torch._subclasses.FakeTensorMode`) have shapes and take no memory, so a model of any size takes
seconds. Only `attach` itself checks that memory reaches the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from mmattn.adapters.base import build_layers
from mmattn.adapters.gated import GatedAdapter
from mmattn.adapters.protocols import Site
from mmattn.errors import AdapterFileError, MmattnError
from mmattn.hosts.attach import adapted_model, host_kind
from mmattn.models.cache import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
    config: PreTrainedConfig,
    *,
    memory_dim: int = 768,
    every: int | None = None,
    where: str | None = None,
    path: str | None = None,
) -> AttachReport:
    """Check from a config whether a model can be a host, and where adapters would act.

    Args:
        config: of transformers.
        memory_dim: e, width of the memory.
        every: a block at every n-th layer; 4 by default, less in smaller models.
        where: as in `GatedAdapter`.
        path: as in `attach`.

    Raises:
        AdapterFileError: transformers makes no model of this config.

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
            stacks = _stacks(model.sites("after"))
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
    tried = ""
    with torch.device("meta"):
        for kind in [named_kind for named_kind in named if named_kind is not None]:
            return _make(kind._from_config, config)
        for auto in _AUTO:
            try:
                return _make(getattr(transformers, auto).from_config, config)
            except AdapterFileError as error:
                tried = tried or str(error)
    raise AdapterFileError(tried)


def _make(make: Callable[..., nn.Module], config: PreTrainedConfig) -> nn.Module:
    try:
        model: nn.Module = make(config)
    except Exception as error:
        raise AdapterFileError(f"transformers makes no model of this {type(config).__name__}: {error}") from error
    return model.eval()


def read_config(name: str | PathLike[str]) -> PreTrainedConfig:
    """Return the config of transformers under a short name or a name on the hub, or in a folder or file."""
    from transformers import AutoConfig

    name = resolve(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        raise AdapterFileError(f"{str(name)!r} is no config of transformers: {said}") from error


def _stacks(sites: Sequence[Site]) -> tuple[tuple[str, str, int, int], ...]:
    """Return part, name, number of layers and width of each list of layers."""
    stacks = Counter((site.part or "", site.module.rpartition(".")[0], site.width) for site in sites)
    return tuple((part, path, count, width) for (part, path, width), count in stacks.items())
