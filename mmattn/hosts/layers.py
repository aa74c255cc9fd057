"""Find the layers of a model of transformers by its modules and by the way of an input."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import depth_of
from mmattn.errors import AttachError
from mmattn.hosts.probe import in_eval_mode
from mmattn.hosts.probe_inputs import host_inputs

_ROWS = 3
_WIDTHS = ("hidden_size", "d_model")


def find_layers(host: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """The path and list of the layers of a host, of a language model those of its decoder."""
    lists = {name: module for name, module in host.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    named = [f"{name} ({len(module)} × {type(module[0]).__name__})" for name, module in lists.items()]
    found = ", ".join(named) or "none"
    if path is not None:
        if path not in lists:
            raise AttachError(f"no list of layers at {path!r} in {type(host).__name__}; lists found: {found}")
        return path, lists[path]
    depth = depth_of(host)
    fitting = _outermost({name: module for name, module in lists.items() if depth is None or len(module) == depth})
    if depth is None or len(fitting) != 1:
        fitting = _passed(host, fitting or _outermost(lists))
    if len(fitting) != 1:
        raise AttachError(
            f"cannot tell which list holds the layers of {type(host).__name__} (num_hidden_layers = {depth}); "
            f"lists found: {found}; name one with path="
        )
    return next(iter(fitting.items()))


def _outermost(lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """Return the modules that are not within another."""
    inner = {name for name in lists for other in lists if name.startswith(other + ".")}
    return {name: module for name, module in lists.items() if name not in inner}


@torch.no_grad()
def _passed(host: nn.Module, lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """The lists whose layers a text passes one after the other; of several that take turns, the one that is last.

    A part that reads pictures or sounds is not run by a text. Where attention and feed-forward layers have lists of
    their own, what a layer hands on is what the last of them does.
    """
    order: list[tuple[str, int]] = []

    def listen(name: str, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(states, Tensor) and states.dim() >= 3:
                order.append((name, number))

        return hook

    hooks = [
        layer.register_forward_hook(listen(name, number))
        for name, module in lists.items()
        for number, layer in enumerate(module)
    ]
    try:
        with in_eval_mode(host):
            for given in host_inputs(host, _ROWS):
                order.clear()
                with contextlib.suppress(Exception):  # what it is about, the probe of the layers says
                    host(**given)
                    break
    finally:
        for handle in hooks:
            handle.remove()
    own = {name: [number for other, number in order if other == name] for name in lists}
    # Layers that attend to pictures are left out where there are none.
    passed = [name for name, numbers in own.items() if numbers and numbers == sorted(set(numbers))]
    turns = [name for name, _ in order if name in passed]
    # Lists that take turns hand the text back and forth; lists after one another are parts of their own.
    if len(passed) > 1 and turns == turns[: len(passed)] * len(lists[passed[0]]):
        passed = turns[-1:]
    return {name: lists[name] for name in passed}


def layers_width(layers: nn.ModuleList, configs: Sequence[Any]) -> int:
    """Width d of the hidden states: the one of a config that norms of a layer have, or what most of them have."""
    sizes = [size for size in map(_norm_width, layers[0].modules()) if size is not None]
    known = [getattr(config, name, None) for config in configs for name in _WIDTHS]
    for width in known:
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
