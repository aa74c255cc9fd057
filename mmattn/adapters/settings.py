"""Shared parts of the methods' settings: default sizes, the choice of layers, a random memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mmattn.adapters.protocols import Host, Site
from mmattn.errors import AttachError, ConfigError, check_bool, check_int
from mmattn.memory import Memory

MAX_WIDTH = 512
#: A norm takes two numbers from a vector, its mean and its length. Of a narrow one that is most of what it says.
NARROW = 12


class AdapterConfig:
    """Base of the settings of a kind of adapter, which are a frozen dataclass (`register_adapter`).

    Attributes:
        kind: the name of the kind in `adapter_config.json`.
        positions: the positions of the sites it acts at.
        example_call: one line of code for the card of a saved adapter.
        default_every: n, if neither `every` nor `layers` is given and the host has so many layers.
        memory_dim: e, width of the memory; 0 where it is no vectors.
    """

    kind: ClassVar[str]
    positions: ClassVar[tuple[str, ...]]
    example_call: ClassVar[str] = "model(..., memory=memory)"
    default_every: ClassVar[int] = 4
    memory_dim: int

    def sites(self, host: Host) -> list[Site]:
        """Return the sites of this host at which the adapter acts; AttachError if it has no such layers.

        By default the layers that the fields `layers` or `every` name, or all without such fields; of a host with an
        encoder and a decoder those of the decoder.
        """
        position = getattr(self, "position", self.positions[0])
        offered = [site for site in host.sites(position) if site.part != "encoder"]
        return chosen_sites(self, offered) if hasattr(self, "every") else offered

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> object:
        """Return a random memory for this adapter, with some slots masked; ConfigError if there is no example."""
        return random_memory(generator, rows, self.memory_dim)


def settle(config: object, **values: object) -> None:
    """Set fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


def settle_nested(config: object, name: str, kind: type, optional: bool = False) -> None:
    """Turn a field given as a mapping (of a YAML file) into its dataclass."""
    value = getattr(config, name)
    if isinstance(value, dict):
        try:
            value = kind(**value)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}") from error
    if not isinstance(value, kind) and not (optional and value is None):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")
    settle(config, **{name: value})


def default_norm(norm: bool | None, e: int) -> bool:
    """Return True if vectors of width e go through a norm: by default wide ones."""
    if norm is None:
        return e >= NARROW
    check_bool("memory_norm", norm)
    return norm


def default_heads(d: int, e: int, num_heads: int | None = None, head_dim: int | None = None) -> tuple[int, int]:
    """Number h and width k of the heads of a cross-attention, whose four matrices hold about 4 d² weights at most.

    An attention layer of the host has as many, so the adapter stays small for any width of the memory. At most 8 heads
    of 64.

    >>> default_heads(768, 768), default_heads(128, 128), default_heads(128, 1280)
    ((8, 64), (8, 16), (1, 16))
    """
    width = min(MAX_WIDTH, d, 2 * d * d // (d + e))
    h = max(1, min(8, width // (head_dim or 16))) if num_heads is None else num_heads
    k = max(8, min(64, width // h // 8 * 8)) if head_dim is None else head_dim
    return h, k


def settle_layers(config: Any) -> None:
    """Check the fields `memory_dim`, `every` and `layers` of settings, and sort `layers`."""
    check_int("memory_dim", config.memory_dim, at_most=65536)
    every, layers = config.every, check_layers("layers", config.layers)
    if every is not None and layers is not None:
        raise ConfigError(f"give every or layers, not both; got every={every} and layers={list(layers)}")
    if every is not None:
        check_int("every", every, at_most=1024)
    if layers is not None and len(set(layers)) != len(layers):
        raise ConfigError(f"layers must differ from each other, got {list(layers)}")
    settle(config, layers=None if layers is None else tuple(sorted(layers)))


def chosen_sites(config: Any, offered: list[Site]) -> list[Site]:
    """Return the sites that the fields `layers` or `every` name, out of those of a host; AttachError for others."""
    depth, every = len(offered), config.every
    if config.layers is not None:
        if config.layers[-1] >= depth:
            raise AttachError(f"layers {list(config.layers)} were asked for and the host has layers 0 to {depth - 1}")
        return [offered[layer] for layer in config.layers]
    if every is not None and every > depth:
        raise AttachError(f"every={every} was asked for and the host has only {depth} layers: choose at most that")
    every = min(config.default_every, depth) if every is None else every
    return offered[every - 1 :: every]


def check_layers(name: str, layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return a list of layers as a tuple, in its order."""
    if layers is None:
        return None
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ConfigError(f"{name} must be a list of layers counted from 0, got {layers!r}")
    return tuple(check_int(name, layer, at_least=0, at_most=4095) for layer in layers)


def settle_augmenting_layers(config: object, layers: Sequence[int] | None, others: Sequence[int] | None) -> None:
    """Sort `augmenting_layers` by the host layers they are paired with."""
    host_layers, augmenting = check_layers("layers", layers), check_layers("augmenting_layers", others)
    if host_layers is not None and augmenting is not None:
        if len(host_layers) != len(augmenting):
            raise ConfigError(
                f"augmenting_layers must name one layer for each of layers {list(host_layers)}, got {others}"
            )
        augmenting = tuple(other for _, other in sorted(zip(host_layers, augmenting, strict=True)))
    settle(config, augmenting_layers=augmenting)


def augmenting_layers_of(others: Sequence[int] | None, layers: Sequence[int]) -> dict[int, int]:
    """Return the layer of an augmenting model for each host layer; by default that of the same number."""
    others = layers if others is None else others
    if len(others) != len(layers):
        raise AttachError(
            f"the adapter is put at layers {list(layers)} of the host and augmenting_layers names {list(others)}: name "
            "one for each"
        )
    return dict(zip(layers, others, strict=True))


def random_memory(
    generator: torch.Generator, rows: int, dim: int, segments: int = 1, scores: bool = False, slots: int = 5
) -> Memory:
    """Return a random memory (rows, segments · slots, dim) with padding in some rows.

    >>> random_memory(torch.Generator().manual_seed(0), rows=2, dim=7).lengths
    [5, 3]
    """
    m = segments * slots
    real = torch.tensor([slots, slots - 2, slots - 1])[torch.arange(rows) % 3]
    mask = torch.arange(m) % slots < real[:, None]
    owner = torch.arange(segments).repeat_interleave(slots).expand(rows, m) if segments > 1 else None
    tokens = torch.randn(rows, m, dim, generator=generator, device=generator.device)
    return Memory(
        tokens, mask, owner, torch.randn(rows, m, generator=generator, device=generator.device) if scores else None
    )
