"""What the trainable parts of all adapters have in common: how a host asks them to read a memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.resampler import PerceiverResampler, Resampler
from mmattn.core.layers import CrossAttention
from mmattn.core.projection import KeyValueProjection
from mmattn.errors import ShapeError
from mmattn.memory import Memory


class AdapterLayers(nn.Module, ABC):
    """The trainable part of one adapter on one host: how it reads a memory, and a block per chosen host layer.

    Args:
        config: the settings, a dataclass with `memory_dim` and `resampler`. host_dim: width of what the host works on.
        layers: the host layers that get a block.
    """

    memory_norm: nn.LayerNorm | None
    score_bias = False

    def __init__(self, config: Any, host_dim: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.host_dim = host_dim
        self.layers = tuple(layers)
        self.names = {layer: str(layer) for layer in self.layers}

    def _add_resampler(self, settings: Resampler | None) -> None:
        self.resampler = None if settings is None else PerceiverResampler(settings, self.config.memory_dim)

    @property
    def weight(self) -> Tensor:
        """A weight that tells on which device and in which dtype a memory is read."""
        assert self.memory_norm is not None
        return self.memory_norm.weight

    @abstractmethod
    def attention(self, layer: int) -> CrossAttention | KeyValueProjection:
        """What attends to the memory for host layer `layer`."""

    @abstractmethod
    def read(self, memory: Memory) -> Memory:
        """The memory as every block sees it."""

    def reading_parameters(self) -> Iterator[nn.Parameter]:
        """The weights that `read` uses."""
        if self.memory_norm is not None:
            yield from self.memory_norm.parameters()
        if self.resampler is not None:
            yield from self.resampler.parameters()

    def check_memory(self, name: str, memory: Memory) -> None:
        """Refuse a memory that this adapter, attached as `name`, cannot read.

        Raises:
            ShapeError: another width.
        """
        if memory.dim != self.config.memory_dim:
            raise ShapeError(
                f"adapter {name!r} was made for memory_dim={self.config.memory_dim}, got a memory of width "
                f"{memory.dim}: use the encoder it was trained with"
            )

    def _taken_in(self, memory: Memory) -> Memory:
        """The memory on the device and in the dtype of the weights, padding set to 0."""
        weight = self.weight
        tokens = memory.tokens.to(weight.device)
        if not torch.is_autocast_enabled(tokens.device.type):
            tokens = tokens.to(weight.dtype)
        if memory.mask is not None:
            tokens = tokens.masked_fill(~memory.mask.to(tokens.device)[..., None], 0)
        return memory.replace(tokens)
