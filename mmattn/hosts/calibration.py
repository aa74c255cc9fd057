"""Calibrate gated blocks to a host: mean and spread, per channel, of the hidden states that they read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.gated.block import BlockLayers, Gate
from mmattn.hosts.attachment import outside_modes
from mmattn.hosts.context import step_of
from mmattn.hosts.probe import in_eval_mode

#: Hidden states of a block that are measured.
MOST = 8192


@contextlib.contextmanager
def calibrating(model: Any, processes: int = 1) -> Iterator[None]:
    """Calibrate the fresh gated adapters of a model by what they read in the forwards inside the block.

    Of several processes each reads rows of its own, and all calibrate by those of all.
    """
    adapters = fresh_adapters(model)
    states: dict[nn.Module, list[Tensor]] = {block: [] for adapter in adapters for block in adapter.blocks.values()}

    def note(block: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, object]) -> None:
        states[block].append(_attending(model, args[0], kwargs.get("has_memory")))

    with contextlib.ExitStack() as hooks, torch.no_grad(), in_eval_mode(model.host):
        for block in states:
            hooks.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield
    for adapter in adapters:
        read = {layer: states[adapter.block(layer)] for layer in adapter.layers}
        tokens = {layer: _thinned(parts, MOST // processes) for layer, parts in read.items() if parts}
        if processes > 1:
            tokens = _of_all_processes(tokens, processes)
        # Of one token there is no spread.
        if len(tokens) == len(read) and min(map(len, tokens.values())) > 1:
            with outside_modes():
                adapter.calibrate(tokens)


def _thinned(parts: list[Tensor], most: int) -> Tensor:
    """Return at most so many of some hidden states (n, d), evenly spread."""
    states = torch.cat(parts)
    return states[:: max(1, -(-len(states) // most))]


def _of_all_processes(tokens: dict[int, Tensor], processes: int) -> dict[int, Tensor]:
    """Return the hidden states (n, d) of each layer in all processes."""
    gathered: list[dict[int, Tensor]] = [{} for _ in range(processes)]
    torch.distributed.all_gather_object(gathered, {layer: states.cpu() for layer, states in tokens.items()})
    layers = dict.fromkeys(layer for by_layer in gathered for layer in by_layer)
    return {layer: torch.cat([by_layer[layer] for by_layer in gathered if layer in by_layer]) for layer in layers}


def fresh_adapters(model: Any) -> list[BlockLayers]:
    """Return the adapters of gated blocks that were never trained: all their gates are 0."""
    layers = [built for built in map(model.adapter, model.adapters) if isinstance(built, BlockLayers)]
    return [
        built
        for built in layers
        if not any(bool(gate.gate.any()) for gate in built.modules() if isinstance(gate, Gate))
    ]


def _attending(model: Any, x: Tensor, has_memory: object) -> Tensor:
    """Return the hidden states (n, d) among x (b, l, d) of tokens that attend to a slot and are no padding."""
    step = step_of(model)
    real = None if step is None or step.details is None else step.details.attention_mask
    chosen = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if isinstance(real, Tensor) and real.dim() == 2 and len(real) == len(x) and real.shape[1] >= x.shape[1]:
        chosen &= real[:, -x.shape[1] :].to(x.device).bool()
    if isinstance(has_memory, Tensor):
        chosen &= has_memory[..., 0]
    return x[chosen].float()
