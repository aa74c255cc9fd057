"""What the core's tests share: sizes, masks, inputs, a layer, and both beside the slow definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mmattn.core.key_values
import mmattn.core.projection
from mmattn import CrossAttention, attend
from mmattn.core.key_values import KeyValue
from tests.reference import assert_close, attend_reference, cross_attention_reference, gradients

B, L, M = 2, 5, 7
# Widths of the heads of `make_heads`; widths of the queries and of the memory of `make_layer`.
K, V = 11, 13
D, E = 19, 23
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BACKENDS = ["sdpa", "eager"]
LAYOUTS = ["padded", "packed", "absorbed", "packed absorbed"]
# Not bitwise: batch split, query split, permutation, duplication, added masked slots.
REORDERED = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# The second row sees nothing.
MASK = torch.tensor([[True, False, True, True, True, False, True], [False] * M])
RULE = torch.rand(L, M, generator=torch.Generator().manual_seed(3)) < 0.5
RULE[3], RULE[:, 2] = False, False
assert not MASK[1].any() and not RULE[3].any() and RULE.any()
# Real slots at the front, as padding leaves them, are read where they lie; scattered ones are gathered.
MASKS = {"scattered": MASK, "in front": torch.arange(M) < torch.tensor([[4], [0]])}


def make_heads(
    dtype: torch.dtype = torch.float64,
    h: int = 5,
    g: int = 5,
    size: float = 1.0,
    *,
    b: int = B,
    l: int = L,
    m: int = M,
    k: int = K,
    v: int = V,
    beams: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (b · beams, h, l, k), k (b, g, m, k), v (b, g, m, v), rounded to `dtype`; `size` is that of the scores."""
    shapes = ((b * beams, h, l, k), (b, g, m, k), (b, g, m, v))
    sizes = (math.sqrt(size), math.sqrt(size), 1.0)
    return tuple((s * torch.randn(shape)).to(dtype).requires_grad_() for s, shape in zip(sizes, shapes, strict=True))


def compare_attend(
    inputs: tuple[Tensor, ...], beams: int = 1, causal: bool = False, floor: float = 0.0, **rules
) -> list[Tensor]:
    """Both backends against the definition, values and gradients, by `yardstick`; returns what `sdpa` gave."""
    dtype = inputs[0].dtype
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    q, k, v = wide[:3]
    k, v = k.repeat_interleave(beams, 0), v.repeat_interleave(beams, 0)
    slow = dict(rules)
    if slow.get("mask") is not None:
        slow["mask"] = slow["mask"].repeat_interleave(beams, 0)
    if len(inputs) == 4:
        slow["bias"] = wide[3]
    expected, _ = attend_reference(q, k, v, causal=causal, **slow)
    upstream = torch.randn(expected.shape).to(dtype)
    expected_grads = gradients(expected, wide, upstream.double())
    largest = torch.stack([grad.abs().max() for grad in expected_grads if grad.numel()] or [torch.zeros(())]).max()
    found = []
    for backend in BACKENDS:
        fast = dict(rules, bias=inputs[3]) if len(inputs) == 4 else rules
        out = attend(*inputs[:3], causal=causal, backend=backend, **fast)
        assert out.dtype == dtype
        assert_close(out, expected, dtype)
        grads = gradients(out, inputs, upstream)
        for name, grad, expected_grad in zip("qkvb", grads, expected_grads, strict=False):
            assert_close(grad, expected_grad, dtype, "grad", size=yardstick(expected_grad, largest, floor))
            assert torch.isfinite(grad).all(), name
        found.append([out, *grads])
    return found[0]


def close(left: Tensor, right: Tensor) -> None:
    assert torch.isfinite(left).all() and torch.isfinite(right).all() and right.any()
    error = (left.double() - right.double()).abs().max() / right.double().abs().max()
    assert error <= REORDERED[left.dtype], f"{error:.1e}"


def make_layer(dtype: torch.dtype = torch.float32, **settings_) -> CrossAttention:
    """A layer of awkward sizes whose every parameter matters."""
    sizes = {"memory_dim": E, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "bias": True} | settings_
    layer = CrossAttention(D, **sizes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype)


def named_weights(layer: CrossAttention) -> dict[str, Tensor]:
    """The parameters of a layer by the names that `cross_attention_reference` reads."""
    return {name.removeprefix("kv_proj."): parameter for name, parameter in layer.named_parameters()}


def force(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(mmattn.core.projection, "PACK_SAVES", -1 if "packed" in layout else float("inf"))
    for margin in ("ABSORB_MARGIN", "ABSORB_MARGIN_HALF"):
        monkeypatch.setattr(mmattn.core.key_values, margin, float("inf") if "absorbed" in layout else 0)
    monkeypatch.setattr(mmattn.core.key_values, "ABSORB_LEAST_HALF", 0)


def kind(kept: KeyValue) -> str:
    return " ".join(["packed"] * (kept.lengths is not None) + ["absorbed"] * kept.absorbed) or "padded"


def yardstick(right: Tensor, largest: Tensor, floor: float) -> Tensor | None:
    """What the errors of a gradient are relative to: itself, but at least this share of the largest gradient.

    Where the gradients of a softmax all but cancel, they are as exact as the terms that cancel.
    """
    return floor * largest if right.numel() and 0 < right.abs().max() <= floor * largest else None


def compare_layer(
    layer: CrossAttention,
    x: Tensor,
    memory: Tensor,
    *,
    through=None,
    scale: float | None = None,
    floor: float = 0.0,
    **given_,
) -> Tensor:
    """`layer` against the definition: output, gradients of the inputs and of every parameter; returns the output.

    Args:
        layer: the claim.
        x: queries (b · beams, l, d).
        memory: slots (b, m, e).
        through: calls the layer in place of `layer(x, memory, ...)`.
        scale: of the scores, where it is not that of the layer.
        floor: as in `yardstick`.
        **given_: the other inputs.
    """
    dtype = layer.q_proj.weight.dtype
    slow = {name: weight.detach().double().requires_grad_() for name, weight in named_weights(layer).items()}
    inputs = {"x": x, "memory": memory}
    fast_inputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    slow_inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in fast_inputs.items()}
    turn = layer.kv_proj.rotary
    rotary = {} if turn is None else {"rotary_base": turn.base, "axes": turn.axes}
    expected, weights = cross_attention_reference(
        slow,
        **slow_inputs,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        scale=scale,
        length_norm=layer.kv_proj.length_norm,
        score_mean=layer.kv_proj.score_mean,
        score_std=layer.kv_proj.score_std,
        **rotary,
        **given_,
    )
    fast = dict(fast_inputs, **given_)
    out = layer(fast.pop("x"), fast.pop("memory"), **fast) if through is None else through(layer, **fast)
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    upstream = torch.randn(expected.shape).to(dtype)
    leaves, slow_leaves = [*fast_inputs.values(), *layer.parameters()], [*slow_inputs.values(), *slow.values()]
    grads = gradients(out, leaves, upstream)
    expected_grads = gradients(expected, slow_leaves, upstream.double())
    largest = torch.stack([right.abs().max() for right in expected_grads if right.numel()]).max()
    for grad, right in zip(grads, expected_grads, strict=True):
        # Some gradients are 0 but for rounding: of a key bias, which every slot gets alike, or of the only slot's key.
        vanishing = right.numel() and right.abs().max() <= 1e-9 * largest
        assert_close(grad, right, dtype, "grad", size=largest if vanishing else yardstick(right, largest, floor))
    fast = dict(fast_inputs, **given_)
    again, found = layer(fast.pop("x"), fast.pop("memory"), **fast, return_weights=True)
    assert_close(again, expected, dtype)
    # The targets name outputs and gradients. Rounding q and k alone moves a single weight by more than an output.
    assert_close(found, weights, dtype, "grad")
    return out


def data(beams: int = 1, l: int = L, m: int = M) -> tuple[Tensor, Tensor]:
    return torch.randn(B * beams, l, D), torch.randn(B, m, E)
