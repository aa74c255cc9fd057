"""Hosts whose own attention takes the slots of adapters; and rectangular attention by the slow definition."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import mmattn
from tests import tiny
from tests.reference import attend_reference

#: Families whose keys are turned by their positions, and those with learned positions.
ROTARY = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox",
    "stablelm", "starcoder2", "olmo2", "granite", "cohere", "glm", "smollm3",
)  # fmt: skip
LEARNED = ("gpt2", "opt")
#: All families whose keys and values can be joined; the others are refused.
REACHED = (*ROTARY, *LEARNED, *(("gptj",) if tiny.IS_5_24 else ()))
#: Relative distance of two answers in float32.
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
    """Inside the block a host without adapters attends as equation 4 of KBLaM says, by the slow definition.

    Args:
        host: with eager attention.
        adapter: the trainable part whose weights are used.
        memory: (b, m, e).
        weights: is given those of the slots (b, h, l, m), by layer.
    """
    module = next(
        sys.modules[kind.__module__]
        for part in host.modules()
        for kind in type(part).__mro__
        if hasattr(sys.modules[kind.__module__], "eager_attention_forward")
    )
    original: Any = module.eager_attention_forward  # type: ignore[attr-defined]
    real = memory.real_slots()

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if layer.layer_idx not in adapter.layers:
            return original(layer, query, key, value, mask, **options)
        block, norm = adapter.block(layer.layer_idx), adapter.memory_norm
        how = {"scale": options.get("scaling"), "softcap": options.get("softcap")}
        slots = torch.nn.functional.layer_norm(memory.tokens, norm.normalized_shape, norm.weight, norm.bias)
        keys, values = (
            (slots @ part.weight.T).unflatten(2, (key.shape[1], -1)).transpose(1, 2)
            for part in (block.k_proj, block.v_proj)
        )
        text = torch.zeros(1, 1, 1, 1) if mask is None else mask[..., : key.shape[2]]
        text = text.expand(len(query), 1, query.shape[2], key.shape[2])
        size = torch.zeros(len(real), 1)
        if block.length_norm is not None:
            size = (block.length_norm / real.sum(1, keepdim=True).clamp(min=1)).log()
        beside = torch.where(real, size, -torch.inf)[:, None, None].expand(-1, 1, query.shape[2], -1)
        plain, _ = attend_reference(query, key, value, bias=text, **how)
        both, shares = attend_reference(
            query, torch.cat([keys, key], 2), torch.cat([values, value], 2), bias=torch.cat([beside, text], 3), **how
        )
        if weights is not None:
            weights[layer.layer_idx] = shares[..., : memory.length].float()
        out = plain + block.gate.gate.tanh()[:, None, None] * (both - plain)
        return out.transpose(1, 2).to(query.dtype), None

    module.eager_attention_forward = attend  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.eager_attention_forward = original  # type: ignore[attr-defined]
