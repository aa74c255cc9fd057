"""What the tests of the composed adapter share: anchors with one, augmenting models, and the slow definition."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import mmattn
from tests import tiny

ROWS, LENGTH = 3, 7
DIM, DEPTH = 24, 5  # of the augmenting model
AUGMENTING_LAYERS = (1, 4)


@functools.cache
def augmenting(family: str = "llama", seed: int = 11) -> Any:
    """A tiny augmenting model of another width and depth than the hosts."""
    return tiny.make(
        family,
        seed,
        **{"n_embd" if family == "gpt2" else "hidden_size": DIM},
        **{"n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers": DEPTH},
    )


def along(family: str = "llama", seed: int = 11) -> mmattn.AugmentingModel:
    """That model as a memory."""
    return mmattn.AugmentingModel(augmenting(family, seed))


def attach(lm: nn.Module, *, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """`mmattn.attach` with a small composed adapter on the first and the third layer, its gates open unless told."""
    inputs = {
        "memory_dim": DIM,
        "layers": (0, 2),
        "augmenting_layers": AUGMENTING_LAYERS,
        "num_heads": 2,
        "head_dim": 6,
    }
    model = mmattn.attach(lm, mmattn.ComposedAdapter(**inputs | settings), name=name)
    return tiny.open_gates(model) if opened else model


@functools.cache
def scene(family: str = "llama") -> SimpleNamespace:
    """An anchor with an open composed adapter and what its untouched twin says, for tests that change neither."""
    ids = tiny.text(ROWS, LENGTH)
    return SimpleNamespace(model=attach(tiny.make(family)), ids=ids, own=tiny.own(ids, family))


@torch.no_grad()
def by_prefixes(anchor: nn.Module, lm: nn.Module, ids: Tensor, adapter: nn.Module) -> Tensor:
    """The definition, slowly: logits (b, l, v) of an anchor of which each layer's every token is composed alone.

    The states that token t sees are those of the augmenting model for the text up to t, and nothing later exists.
    """
    states = [lm(ids[:, : t + 1], output_hidden_states=True).hidden_states for t in range(ids.shape[1])]

    def after(layer: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            x = output if isinstance(output, Tensor) else output[0]
            block, at = adapter.block(layer), adapter.augmenting_layers[layer] + 1
            out = []
            for t in range(x.shape[1]):
                outputs = torch.stack([states[s][at][:, s] for s in range(t + 1)], 1)
                memory = adapter.memory_norm(outputs)
                where = torch.arange(t + 1)
                result = block.attention(block.norm(x[:, t : t + 1]), memory, query_positions=where[-1:],
                                        memory_positions=where)  # fmt: skip
                out.append(x[:, t : t + 1] + block.gate() * result)
            generated = torch.cat(out, 1)
            return generated if isinstance(output, Tensor) else (generated, *output[1:])

        return hook

    layers = tiny.decoder_layers(anchor)
    hooks = [layers[layer].register_forward_hook(after(layer)) for layer in adapter.layers]
    try:
        return anchor(ids).logits
    finally:
        for hook in hooks:
            hook.remove()
