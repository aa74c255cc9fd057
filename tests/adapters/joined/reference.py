"""Rectangular attention step by step: one softmax over the slots of a memory and the tokens that a host may see."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import mmattn
from tests import tiny

#: Families whose keys and values can be joined, and those that are refused.
REACHED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2",
    "gpt_neox", "opt", "stablelm", "starcoder2", "olmo2", "granite", "cohere", "glm", "smollm3",
    *(("gptj",) if tiny.IS_5_24 else ()),
)  # fmt: skip
CLOSE = 1e-5


def answer(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The logits of a call without gradients."""
    with torch.no_grad():
        logits: Tensor = model(*args, **kwargs).logits
    return logits


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative distance; everything must be finite."""
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all() and torch.isfinite(wanted).all()
    return float((found - wanted).norm() / wanted.norm())


@contextmanager
def rectangular(
    host: Any, adapter: Any, memory: mmattn.Memory, weights: MutableMapping[int, Tensor] | None = None
) -> Iterator[None]:
    """Inside the block a host without adapters attends as equation 4 says, with loops over rows, heads and tokens.

    Args:
        host: with eager attention.
        adapter: the trainable part whose weights are used.
        memory: (b, m, e), masked slots last.
        weights: is given those of the slots (b, h, l, m), by layer.
    """
    module = next(
        sys.modules[kind.__module__]
        for part in host.modules()
        for kind in type(part).__mro__
        if hasattr(sys.modules[kind.__module__], "eager_attention_forward")
    )
    original: Any = module.eager_attention_forward  # type: ignore[attr-defined]

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if layer.layer_idx not in adapter.layers:
            return original(layer, query, key, value, mask, **options)
        block = adapter.block(layer.layer_idx)
        scaling = options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        shares = torch.zeros(*query.shape[:3], memory.length)
        out = torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        for row in range(query.shape[0]):
            tokens = memory.tokens[row][memory.real_slots()[row]]
            slots = torch.nn.functional.layer_norm(tokens, tokens.shape[-1:], *adapter.memory_norm.parameters())
            for head in range(query.shape[1]):
                group = head * key.shape[1] // query.shape[1]
                keys, values = (
                    (slots @ part.weight.T).unflatten(1, (key.shape[1], -1))[:, group]
                    for part in (block.k_proj, block.v_proj)
                )
                gate = block.gate.gate.tanh()[head if block.gate.gate.numel() > 1 else 0]
                for token in range(query.shape[2]):
                    q = query[row, head, token]
                    ahead = torch.zeros(key.shape[2]) if mask is None else mask[min(row, len(mask) - 1), 0, token]
                    text = capped(key[row, group] @ q * scaling, options) + ahead[: key.shape[2]]
                    plain = text.softmax(0) @ value[row, group]
                    if not len(slots):
                        out[row, token, head] = plain
                        continue
                    scores = capped(keys @ q * scaling, options)
                    if block.length_norm is not None:
                        scores = scores + math.log(block.length_norm) - math.log(len(slots))
                    share = torch.cat([scores, text]).softmax(0)
                    shares[row, head, token, : len(slots)] = share[: len(slots)]
                    both = share @ torch.cat([values, value[row, group]])
                    out[row, token, head] = plain + gate * (both - plain)
        if weights is not None:
            weights[layer.layer_idx] = shares
        return out, None

    module.eager_attention_forward = attend  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.eager_attention_forward = original  # type: ignore[attr-defined]


def capped(scores: Tensor, options: dict[str, Any]) -> Tensor:
    """Scores as Gemma 2 bounds them."""
    cap = options.get("softcap")
    return scores if cap is None else cap * (scores / cap).tanh()
