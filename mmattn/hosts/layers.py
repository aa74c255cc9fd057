"""Find the layers of a model of transformers by its modules and by the way of an input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import depth_of
from mmattn.errors import AttachError
from mmattn.hosts.context import LayerOutput
from mmattn.hosts.probe import host_inputs, in_eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ROWS = 3
_WIDTHS = ("hidden_size", "d_model")


def find_layers(host: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """Return the path and the list of the layers of a host; of a language model, of its decoder."""
    lists = _layer_lists(host)
    if path is not None:
        if path not in lists:
            raise AttachError(
                f"no list of layers at {path!r} in {type(host).__name__}; lists found: {describe_lists(lists)}"
            )
        return path, lists[path]
    depth, outermost = depth_of(host), outermost_lists(host)
    fitting = outermost_lists(host, depth)
    if depth is None or len(fitting) != 1:
        fitting = _passed(host, fitting or outermost)
    if len(fitting) != 1:
        raise AttachError(
            f"cannot tell which list holds the layers of {type(host).__name__} (num_hidden_layers = {depth}); "
            f"lists found: {describe_lists(lists)}; name one with path="
        )
    return next(iter(fitting.items()))


def outermost_lists(host: nn.Module, depth: int | None = None) -> dict[str, nn.ModuleList]:
    """Return the lists of layers, all or those of one length, that are not within another."""
    lists = {name: layers for name, layers in _layer_lists(host).items() if depth is None or len(layers) == depth}
    return {name: layers for name, layers in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}


def describe_lists(lists: Mapping[str, nn.ModuleList]) -> str:
    """Return the lists with their lengths and classes, for a message."""
    return ", ".join(f"{name} ({len(layers)} × {type(layers[0]).__name__})" for name, layers in lists.items()) or "none"


def _layer_lists(host: nn.Module) -> dict[str, nn.ModuleList]:
    return {name: module for name, module in host.named_modules() if isinstance(module, nn.ModuleList) and len(module)}


def _passed(host: nn.Module, lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """Return the lists whose layers a text passes one after the other; of several that take turns, the last.

    A part that reads pictures or sounds is not run by a text. Where attention and feed-forward layers have lists of
    their own, what a layer hands on is what the last of them does.
    """
    order = _order(host, lists)
    numbers_of = {name: [number for other, number in order if other == name] for name in lists}
    # Layers that attend to pictures do not run without them.
    passed = [name for name, numbers in numbers_of.items() if numbers and numbers == sorted(set(numbers))]
    turns = [name for name, _ in order if name in passed]
    # Lists that take turns hand the text back and forth; lists after one another are parts of their own.
    if len(passed) > 1 and turns == turns[: len(passed)] * len(lists[passed[0]]):
        passed = turns[-1:]
    return {name: lists[name] for name in passed}


@torch.no_grad()
def _order(host: nn.Module, lists: Mapping[str, nn.ModuleList]) -> list[tuple[str, int]]:
    """Return the layers of these lists in the order in which a text passes them."""
    order: list[tuple[str, int]] = []

    def listen(name: str, number: int) -> Callable[[nn.Module, object, LayerOutput], None]:
        def hook(module: nn.Module, args: object, output: LayerOutput) -> None:
            states = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(states, Tensor) and states.dim() >= 3:
                order.append((name, number))

        return hook

    with contextlib.ExitStack() as hooks, in_eval_mode(host):
        for name, module in lists.items():
            for number, layer in enumerate(module):
                hooks.enter_context(layer.register_forward_hook(listen(name, number)))
        for inputs in host_inputs(host, _ROWS):
            order.clear()
            with contextlib.suppress(Exception):  # the probe reports the cause
                host(**inputs)
                break
    return order


def layers_width(layers: nn.ModuleList, configs: Sequence[PreTrainedConfig | None]) -> int:
    """Width d of the hidden states: the one of a config that norms of a layer have, or what most of them have."""
    sizes = [size for size in map(_norm_width, layers[0].modules()) if size is not None]
    widths = [getattr(config, name, None) for config in configs for name in _WIDTHS]
    for width in widths:
        if isinstance(width, int) and (width in sizes or not sizes):
            return width
    if sizes:
        return max(set(sizes), key=sizes.count)
    raise AttachError(f"neither config nor norms tell the width of {type(layers[0]).__name__}")


def _norm_width(module: nn.Module) -> int | None:
    """Return the width of a norm, or None for other modules."""
    weight = getattr(module, "weight", None)
    norm = isinstance(weight, nn.Parameter) and weight.dim() == 1 and "norm" in type(module).__name__.lower()
    return len(weight) if norm else None  # type: ignore[arg-type]
