"""What must not change what a layer gives: nothing to look at, garbage, order, company and storage of its memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from mmattn import CrossAttention
from tests.core.random_inputs import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    MASKS,
    RULE,
    B,
    D,
    E,
    L,
    M,
    data,
    force,
    make_layer as make,
)
from tests.reference import gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_to_look_at(layout, backend, monkeypatch):
    """Invariant 10: a memory of length 0 adds exactly nothing, with biases, null slot and weights asked for too."""
    force(monkeypatch, layout)
    for options in ({}, {"null_slot": True, "length_norm": 5.0}, {"qk_norm": True}):
        layer = make(backend=backend, **options)
        x, memory = (tensor.requires_grad_() for tensor in data(m=0))
        for mask in (None, torch.ones(B, 0, dtype=torch.bool)):
            out, weights = layer(x, memory, mask=mask, return_weights=True)
            assert torch.equal(x + out, x) and weights.shape == (B, 6, L, 0)
            assert torch.equal(x + layer(x, memory, mask=mask), x)
            assert torch.equal(x + layer(x, layer.project(memory, mask=mask)), x)
            for grad in torch.autograd.grad(out.sum(), [x, memory, *layer.parameters()], allow_unused=True):
                assert grad is None or not grad.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("b,l", [(0, L), (B, 0), (0, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batches(backend, b, l, layout, monkeypatch):
    """Invariant 11: no rows or no queries give an empty output of the right shape, and no gradient fails."""
    force(monkeypatch, layout)
    layer = make(backend=backend)
    x, memory = torch.randn(b, l, D), torch.randn(b, M, E, requires_grad=True)
    for mask in (None, torch.ones(b, M, dtype=torch.bool), torch.zeros(b, M, dtype=torch.bool)):
        out, weights = layer(x, memory, mask=mask, return_weights=True)
        assert out.shape == x.shape and weights.shape == (b, 6, l, M)
        out = layer(x, memory, mask=mask)
        assert out.shape == x.shape
        (grad,) = torch.autograd.grad(out.sum(), memory, allow_unused=True)
        assert grad is None or not grad.any()
        assert layer(x, layer.project(memory, mask=mask)).shape == x.shape


@pytest.mark.parametrize("real", list(MASKS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 6e4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_garbage_behind_the_mask(backend, garbage, layout, real, monkeypatch):
    """Invariant 7: what lies in masked slots, in their scores too, changes nothing: forward and backward, bit for
    bit.
    """
    force(monkeypatch, layout)
    layer = make(score_bias=True, backend=backend)
    (x, memory), scores = data(), torch.randn(B, M)
    for rules in ({}, {"attention_mask": RULE}):
        results = []
        hidden = ~(MASKS[real] if not rules else MASKS[real] & RULE.any(0))
        for value in (0.0, garbage):
            leaf = memory.masked_fill(hidden[..., None], value).requires_grad_()
            opinion = scores.masked_fill(hidden, value).requires_grad_()
            out = layer(x, leaf, mask=MASKS[real], **rules, scores=opinion)
            leaves = [leaf, opinion, *layer.parameters()]
            results.append([out, *gradients(out, leaves, torch.ones_like(out))])
        for mine, other in zip(*results, strict=True):
            assert torch.isfinite(other).all() and torch.equal(mine, other)
        assert results[0][0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bitwise(backend, layout, dtype, monkeypatch):
    """Invariant 12: a mask that is all True, the same call twice, and a deep copy are equal bit for bit."""
    force(monkeypatch, layout)
    layer = make(dtype, backend=backend)
    x, memory = (tensor.to(dtype) for tensor in data())
    out = layer(x, memory)
    assert torch.isfinite(out).all()
    assert torch.equal(layer(x, memory, mask=torch.ones(B, M, dtype=torch.bool)), out)
    assert torch.equal(layer(x, memory), out) and torch.equal(copy.deepcopy(layer)(x, memory), out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rearranged(backend, dtype, layout, monkeypatch):
    """Invariants 7, 13, 14: slots permuted, doubled, joined by masked ones; rows and queries one at a time."""
    force(monkeypatch, layout)
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    # The absorbed form passes through the memory's own width, so its sums are longer than those the rule measured.
    tolerance = tolerance * (4 if "absorbed" in layout else 1)
    layer = CrossAttention(D, E, 6, num_kv_heads=2, head_dim=8, bias=True, backend=backend).to(dtype)
    x, memory = (tensor.to(dtype) for tensor in data())
    mask = torch.rand(B, M) < 0.6
    mask[:, 2], mask[:, 3] = True, False
    out = layer(x, memory, mask=mask)
    order = torch.randperm(M)
    junk = torch.cat([memory, 30 * torch.randn(B, 7, E).to(dtype)], 1)
    others = {
        "permuted": layer(x, memory[:, order], mask=mask[:, order]),
        "doubled": layer(x, torch.cat([memory, memory], 1), mask=torch.cat([mask, mask], 1)),
        "joined": layer(x, junk, mask=F.pad(mask, (0, 7))),
        "by row": torch.cat([layer(x[i : i + 1], memory[i : i + 1], mask=mask[i : i + 1]) for i in range(B)]),
        "by query": torch.cat([layer(x[:, i : i + 1], memory, mask=mask) for i in range(L)], 1),
    }
    for name, other in others.items():
        assert torch.isfinite(other).all()
        error = (other.double() - out.double()).abs().max() / out.double().abs().max()
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout, monkeypatch):
    """Invariant 17: memories that are expanded (stride 0), transposed or sliced count as their contiguous copies do."""
    force(monkeypatch, layout)
    layer, x = make(), torch.randn(B, L, D)
    for m in (31, 32, 33, 65, 577):
        mask = torch.rand(B, m) < 0.6
        memory = torch.randn(B, m, E)
        for other in (
            memory[:1].expand(B, m, E),
            memory.transpose(1, 2).contiguous().transpose(1, 2),
            torch.cat([memory, memory], 2)[..., :E],
        ):
            assert not other.is_contiguous()
            for given_ in ({}, {"mask": mask}):
                expected = layer(x, other.contiguous(), **given_)
                torch.testing.assert_close(layer(x, other, **given_), expected, rtol=0, atol=1e-5)
