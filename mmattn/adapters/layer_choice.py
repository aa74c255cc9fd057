"""At which layers of a host an adapter acts: every n-th, or those of a list."""

from __future__ import annotations

from collections.abc import Sequence

from mmattn.adapters.protocols import Site
from mmattn.errors import AttachError, ConfigError, check_int

#: An adapter acts at every n-th layer where nothing else is asked for and the host has so many.
EVERY = 4


def check_layers(every: int | None, layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """The list of layers, sorted; None where there is none."""
    if every is not None and layers is not None:
        raise ConfigError(f"give every or layers, not both; got every={every} and layers={layers}")
    if every is not None:
        check_int("every", every, at_most=1024)
    if layers is None:
        return None
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ConfigError(f"layers must be a list of host layers counted from 0, got {layers!r}")
    selected = tuple(check_int("layers", layer, at_least=0, at_most=4095) for layer in layers)
    if len(set(selected)) != len(selected):
        raise ConfigError(f"layers must differ from each other, got {list(selected)}")
    return tuple(sorted(selected))


def check_other_layers(others: Sequence[int] | None, layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """The layers of an augmenting model that go with those of a host, in the order of the host's; None is none."""
    if others is None:
        return None
    if not isinstance(others, Sequence) or isinstance(others, str) or not others:
        raise ConfigError(f"augmenting_layers must be a list of layers counted from 0, got {others!r}")
    selected = tuple(check_int("augmenting_layers", layer, at_least=0, at_most=4095) for layer in others)
    if layers is None:
        return selected
    if len(layers) != len(selected):
        raise ConfigError(
            f"augmenting_layers must name one layer for each of layers, got {list(selected)} for {list(layers)}"
        )
    return tuple(other for _, other in sorted(zip(layers, selected, strict=True)))


def augmenting_layers_of(others: Sequence[int] | None, layers: Sequence[int]) -> dict[int, int]:
    """Return the layer of an augmenting model for each host layer; by default that of the same number."""
    others = layers if others is None else others
    if len(others) != len(layers):
        raise AttachError(
            f"the adapter is put at layers {list(layers)} of the host and augmenting_layers names {list(others)}: name "
            "one for each"
        )
    return dict(zip(layers, others, strict=True))


def chosen_sites(offered: Sequence[Site], every: int | None, layers: Sequence[int] | None) -> list[Site]:
    """The sites that `layers` or `every` names."""
    depth = len(offered)
    if layers is not None:
        if layers[-1] >= depth:
            raise AttachError(f"layers {list(layers)} were asked for and the host has layers 0 to {depth - 1}")
        return [offered[layer] for layer in layers]
    if every is not None and every > depth:
        raise AttachError(f"every={every} was asked for and the host has only {depth} layers: choose at most {depth}")
    every = min(EVERY, depth) if every is None else every
    return list(offered[every - 1 :: every])
