"""The layers of the encoder and of the decoder of a model that has both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mmattn.adapters.language_models import device_of
from mmattn.adapters.protocols import Site
from mmattn.errors import AttachError
from mmattn.hosts.layers import layers_width

DECODER, ENCODER = "decoder", "encoder"
_DEPTHS = {
    DECODER: ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_hidden_layers"),
    ENCODER: ("encoder_layers", "num_layers", "encoder_num_hidden_layers", "num_hidden_layers"),
}


@dataclass(frozen=True)
class Stack:
    """The layers of one part.

    Args:
        part: "encoder" or "decoder".
        path: dotted name of their list in the host.
        layers: the list.
        width: d of their hidden states.
        first: number of the first layer among those of the host.
    """

    part: str
    path: str
    layers: nn.ModuleList
    width: int
    first: int

    def sites(self, position: str) -> list[Site]:
        """Every layer."""
        return [
            Site(self.first + index, position, f"{self.path}.{index}", self.width, device_of(layer), part=self.part)
            for index, layer in enumerate(self.layers)
        ]


def find_stacks(host: Any) -> tuple[Stack, Stack]:
    """The decoder and the encoder.

    Args:
        host: a model of transformers with both.

    Raises:
        AttachError: which lists hold their layers cannot be told.
    """
    decoder = _stack(host, DECODER, host.get_decoder(), 0)
    return decoder, _stack(host, ENCODER, host.get_encoder(), len(decoder.layers))


def _stack(host: nn.Module, part: str, module: nn.Module, first: int) -> Stack:
    names = {id(one): name for name, one in host.named_modules()}
    lists = {name: one for name, one in module.named_modules() if isinstance(one, nn.ModuleList) and len(one)}
    configs = [own for own in (getattr(module, "config", None), getattr(host, "config", None)) if own is not None]
    depths = [getattr(config, name, None) for config in configs for name in _DEPTHS[part]]
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    longest = max((len(lists[name]) for name in outer), default=0)
    for depth in dict.fromkeys([*(depth for depth in depths if isinstance(depth, int)), longest]):
        fitting = [name for name in outer if len(lists[name]) == depth]
        if len(fitting) == 1:
            layers = lists[fitting[0]]
            return Stack(part, names[id(layers)], layers, layers_width(layers, configs), first)
    found = ", ".join(f"{name} ({len(lists[name])} × {type(lists[name][0]).__name__})" for name in outer) or "none"
    raise AttachError(
        f"cannot tell which list holds the layers of the {part} of {type(host).__name__}; lists found: {found}"
    )
