"""What the tests of fused caches share: hosts, a model that has read the prompt, and the slow definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn.adapters import FusedCacheAdapter
from mmattn.adapters.composed import AugmentedPrompt
from tests import tiny
from tests.adapters.composed import composed_hosts as composing

#: Layers of the augmenting model that go with the host's first and third.
OTHERS = composing.AUGMENTING_LAYERS
HIDDEN = 11
#: Families whose keys come from `k_proj` as they are turned: the slow definition acts there.
PROJECTED = ("llama", "mistral", "qwen2", "gemma2", "phi", "starcoder2", "granite", "smollm3")


def adapted(family: str, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """A tiny host with a fused cache in its first and third layer, its weights as if they had been trained."""
    options = settings.pop("host", {})
    inputs = {"memory_dim": composing.along().cache_dim, "layers": (0, 2), "augmenting_layers": OTHERS}
    inputs |= {"hidden_dim": HIDDEN, **settings}
    host = tiny.make(family, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = mmattn.attach(host, FusedCacheAdapter(**inputs), name)
    return tiny.open_gates(model) if opened else model


def read(ids: Tensor, mask: Tensor | None = None, seed: int = 11) -> AugmentedPrompt:
    """What another language model has cached of prompts."""
    return composing.along(seed=seed).prefill(ids, mask)


@contextmanager
def fused(host: Any, adapter: Any, lm: Any, ids: Tensor, lengths: list[int]) -> Iterator[None]:
    """Inside the block the projections of a host give keys and values that are fused, token by token.

    Args:
        host: without adapters, a `PROJECTED` family.
        adapter: the trainable part whose weights are used.
        lm: the augmenting model, a Llama.
        ids: (b, l), of the text.
        lengths: of each prompt, the first tokens of the text.
    """
    states: dict[tuple[int, str], Tensor] = {}
    with ExitStack() as stack:
        for number, layer in enumerate(lm.model.layers):
            for name in ("k_proj", "v_proj"):
                hook = getattr(layer.self_attn, name).register_forward_hook(
                    lambda _, __, out, key=(number, name): states.__setitem__(key, out)
                )
                stack.callback(hook.remove)
        with torch.no_grad():
            lm(ids)
    host_projections: dict[int, dict[str, Tensor]] = {}

    def change(layer: int) -> tuple[Tensor, Tensor]:
        block, other = adapter.block(layer), adapter.augmenting_layers[layer]
        key, value = host_projections[layer]["k_proj"], host_projections[layer]["v_proj"]
        heads = block.num_kv_heads
        result = torch.zeros(2, *key.shape)
        for row, length in enumerate(lengths):
            for token in range(length):
                # Heads one after the other: the keys of one, then its values.
                mine = torch.cat([one[row, token].view(heads, -1) for one in (key, value)], 1).flatten()
                theirs = torch.cat([states[other, name][row, token] for name in ("k_proj", "v_proj")])
                inner = torch.cat([block.host_norm(mine), block.memory_norm(theirs)])
                inner = torch.nn.functional.gelu(inner @ block.in_proj.weight.T + block.in_proj.bias)
                generated = (inner @ block.out_proj.weight.T + block.out_proj.bias).view(heads, 2, -1)
                gates = block.gate.gate.tanh()
                for place in range(2):
                    result[place, row, token] = (gates[place][:, None] * generated[:, place]).flatten()
        return result[0], result[1]

    with ExitStack() as stack:
        layers = tiny.decoder_layers(host)
        for layer in adapter.layers:
            attention = layers[layer].self_attn
            for place, name in enumerate(("k_proj", "v_proj")):
                part = getattr(attention, name)
                part._own = part.forward

                def projected(x: Tensor, layer: int = layer, place: int = place, attention: Any = attention) -> Tensor:
                    parts = [getattr(attention, one)._own(x) for one in ("k_proj", "v_proj")]
                    host_projections[layer] = dict(zip(("k_proj", "v_proj"), parts, strict=True))
                    return parts[place] + change(layer)[place]

                part.forward = projected
                stack.callback(lambda part=part: (part.__dict__.pop("forward"), part.__dict__.pop("_own")))
        yield
