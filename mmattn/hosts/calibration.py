"""Calibrate gated blocks to a host: mean and spread, per channel, of the hidden states that they read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmattn.adapters.gated_block import BlockLayers, Gate, GatedBlock
from mmattn.hosts.context import step_of
from mmattn.hosts.hooks import HookedModel

#: Hidden states of a block that are measured.
MOST = 8192


@contextlib.contextmanager
def calibrating(model: HookedModel) -> Iterator[None]:
    """Calibrate the fresh gated adapters of a model by what they read in the forwards inside the block."""
    adapters = fresh_adapters(model)
    states: dict[GatedBlock, list[Tensor]] = {block: [] for one in adapters for block in one.gated_blocks()}

    def note(block: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, object]) -> None:
        assert isinstance(block, GatedBlock)
        states[block].append(_attending(model, args[0], kwargs.get("seen")))

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for block in states:
            hooks.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield
    for adapter in adapters:
        read = {block: torch.cat(states[block]) for block in adapter.gated_blocks() if states[block]}
        # Of one token there is no spread.
        if all(len(tokens) > 1 for tokens in read.values()) and len(read) == len(adapter.layers):
            for block, tokens in read.items():
                block.calibrate(tokens[:: -(-len(tokens) // MOST)])
            adapter.config = replace(adapter.config, layout=replace(adapter.config.layout, calibrated=True))


def fresh_adapters(model: HookedModel) -> list[BlockLayers]:
    """Return the adapters of gated blocks that were never trained: all their gates are 0."""
    layers = [one for one in map(model.adapter, model.adapters) if isinstance(one, BlockLayers)]
    return [one for one in layers if not any(bool(gate.gate.any()) for gate in one.modules() if isinstance(gate, Gate))]


def _attending(model: HookedModel, x: Tensor, seen: object) -> Tensor:
    """Return the hidden states (n, d) among x (b, l, d) of tokens that attend to a slot and are no padding."""
    step = step_of(model)
    real = None if step is None or step.details is None else step.details.attention_mask
    chosen = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if isinstance(real, Tensor) and real.dim() == 2 and len(real) == len(x) and real.shape[1] >= x.shape[1]:
        chosen &= real[:, -x.shape[1] :].to(x.device).bool()
    if isinstance(seen, Tensor):
        chosen &= seen[..., 0]
    return x[chosen].float()
