"""Where the decoder layers of a causal language model are: found by looking, and by what a text passes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import depth_of, device_of, embeddings_of
from mmattn.errors import AttachError

_ROWS, _LENGTH = 3, 2


def find_layers(host: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """The path and list of decoder layers of a host.

    Args:
        host: the language model.
        path: where the list is; by default the outermost `nn.ModuleList` that is as long as the config says. Of
            several, or where none is, the one that a text without pictures or sounds passes, layer by layer.

    Raises:
        AttachError: none or several fit; the message lists what was found.
    """
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
            f"cannot tell which list holds the decoder layers of {type(host).__name__} (num_hidden_layers = {depth}); "
            f"lists found: {found}; name one with path="
        )
    return next(iter(fitting.items()))


def _outermost(lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """Those that are not within another."""
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

    ids = torch.ones(_ROWS, _LENGTH, dtype=torch.long, device=device_of(embeddings_of(host)))
    modes = [(module, module.training) for module in host.modules()]
    hooks = [
        layer.register_forward_hook(listen(name, number))
        for name, module in lists.items()
        for number, layer in enumerate(module)
    ]
    try:
        for module, _ in modes:
            module.training = False
        with contextlib.suppress(Exception):  # what it is about, the probe of the layers says
            host(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        for module, mode in modes:
            module.training = mode
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
