"""NaN and infinity in slots, scores and biases reach those who may look at them and nobody else, on every path."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmattn import attend
from mmattn.core.key_values import KeyValue
from mmattn.core.masks import Mask
from tests.core.random_inputs import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    MASK,
    RULE,
    B,
    D,
    E,
    L,
    M,
    force,
    kind,
    make_heads,
    make_layer,
)
from tests.device import act_as_device
from tests.reference import assert_close, attend_reference, gradients

#: Layouts and what a layer has beside; keys that are more than a matrix times the memory are never absorbed.
CASES = [(layout, {}) for layout in LAYOUTS] + [
    (layout, options)
    for layout in ("padded", "packed")
    for options in ({"null_slot": True, "length_norm": 5.0}, {"qk_norm": True})
]

# ---- a bias of -inf on every slot that may be seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("h,g,beams", [(5, 5, 1), (6, 2, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_that_hides_all(dtype, h, g, beams, backend):
    """Invariant 6: such queries give exactly 0 and finite gradients, as if those slots were masked; with weights as
    without.
    """
    hidden = torch.rand(B * beams, 1, L, M) < 0.3
    # Query 1 sees nothing by the bias alone, query 2 by bias and mask together.
    hidden[:, :, 1], hidden[:, :, 2] = True, MASK.repeat_interleave(beams, 0)[:, None]
    for mask, rule in ((None, None), (MASK, None), (MASK, RULE)):
        inputs = make_heads(dtype, h, g, beams=beams)
        bias = torch.randn(B * beams, 1, L, M).to(dtype).requires_grad_()
        wide = [tensor.detach().double().requires_grad_() for tensor in (*inputs, bias)]
        seen = ~hidden if rule is None else ~hidden & rule
        copies = [wide[0], *(tensor.repeat_interleave(beams, 0) for tensor in wide[1:3])]
        padding = None if mask is None else mask.repeat_interleave(beams, 0)
        expected, _ = attend_reference(*copies, mask=padding, attention_mask=seen.expand(-1, h, -1, -1), bias=wide[3])
        given = {"mask": mask, "attention_mask": rule, "bias": bias.masked_fill(hidden, -math.inf)}
        out = attend(*inputs, **given, backend=backend)
        assert not out[:, :, 1].any() and (mask is None or not out[:, :, 2].any()) and out.any()
        assert_close(out, expected, dtype)
        upstream = torch.randn(expected.shape).to(dtype)
        expected_gradients = gradients(expected, wide, upstream.double())
        for grad, right in zip(gradients(out, (*inputs, bias), upstream), expected_gradients, strict=True):
            assert_close(grad, right, dtype, "grad")
        again, weights = attend(*inputs, **given, backend=backend, return_weights=True)
        assert_close(again, expected, dtype)
        assert torch.isfinite(weights).all() and not weights[hidden.expand_as(weights)].any()


# ---- slots that only some queries may look at

BEFORE, FIRST_SIX = torch.ones(L, M, dtype=torch.bool).tril(M - L - 1), torch.arange(M).expand(B, M) < 6
assert BEFORE[:, 4].tolist() == [False, False, False, True, True]
RULES = {
    "causal": {"causal": True},
    "(l, m)": {"attention_mask": BEFORE},
    "(b, l, m)": {"attention_mask": BEFORE.expand(B, L, M)},
    "and padding": {"attention_mask": BEFORE, "mask": FIRST_SIX},
}


def reached(name: str) -> Tensor:
    """Which queries may look at slot 4."""
    return torch.arange(L) >= (2 if name == "causal" else 3)


@pytest.fixture(params=[True, False], ids=["read", "not read"])
def reading(request, monkeypatch) -> bool:
    """On an accelerator and in a traced graph no value is looked at."""
    if not request.param:
        act_as_device(monkeypatch)
    return request.param


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rules", list(RULES))
@pytest.mark.parametrize("h,g", [(5, 5), (6, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_that_some_may_see(dtype, h, g, rules, backend, garbage, reading):
    """Invariant 6: it reaches those queries alone; the others and their gradients are what they are without it."""
    clean = make_heads(dtype, h, g)
    far = reached(rules)
    upstream = torch.randn(B, h, L, clean[2].shape[3]).to(dtype).masked_fill(far[:, None], 0)
    for dirty_parts in ((1,), (2,), (1, 2)):
        dirty = [tensor.detach().clone() for tensor in clean]
        for part in dirty_parts:
            dirty[part][1, :, 4] = garbage
        results = []
        for inputs in (clean, dirty):
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            out = attend(*leaves, **RULES[rules], backend=backend)
            results.append([out, *gradients(out, leaves, upstream)])
            weights = attend(*leaves, **RULES[rules], return_weights=True)[1]
        (out, *grads), (dirty_out, *dirty_grads) = results
        assert dirty_out[1, :, far].isnan().all() and weights[1, :, far].isnan().all()
        assert torch.isfinite(weights[1, :, ~far]).all() and torch.isfinite(weights[0]).all()
        assert_close(dirty_out[:, :, ~far], out[:, :, ~far].double(), dtype)
        assert_close(dirty_out[0], out[0].double(), dtype)
        for grad, right in zip(dirty_grads, grads, strict=True):
            assert_close(grad, right.double(), dtype, "grad")


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("head", range(2))
def test_garbage_in_one_head_alone(head, part, reading):
    """Invariant 185: a number of one head of keys or values that is not finite reaches those who may see its slot."""
    clean = make_heads(torch.float64, 6, 2)
    dirty = [tensor.detach().clone() for tensor in clean]
    dirty[part][1, head, 4, 3] = math.nan
    rule = torch.ones(L, M, dtype=torch.bool)
    rule[1:, 4] = False
    out, found = (attend(*inputs, attention_mask=rule) for inputs in (clean, dirty))
    assert found[1, :, 0].isnan().all()
    assert_close(found[1, :, 1:], out[1, :, 1:], torch.float64)
    assert_close(found[0], out[0], torch.float64)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_ahead_of_a_text(dtype, backend, garbage, reading):
    """Causal attention with as many queries as slots, which is the kernel's own rule."""
    clean = make_heads(dtype, 5, 5, l=M)
    dirty = [tensor.detach().clone().requires_grad_() for tensor in clean]
    with torch.no_grad():
        dirty[1][0, :, 5], dirty[2][0, :, 5] = garbage, garbage
    upstream = torch.randn(B, 5, M, clean[2].shape[3]).to(dtype)
    upstream[:, :, 5:] = 0
    out, other = (attend(*inputs, causal=True, backend=backend) for inputs in (clean, dirty))
    assert other[0, :, 5:].isnan().all() and torch.isfinite(other[1]).all()
    assert_close(other[:, :, :5], out[:, :, :5].double(), dtype)
    for grad, right in zip(gradients(other, dirty, upstream), gradients(out, clean, upstream), strict=True):
        assert_close(grad, right.double(), dtype, "grad")


@pytest.mark.parametrize("backend", BACKENDS)
def test_garbage_that_another_beam_or_head_may_see(backend, reading):
    """Rules that differ between beams of one memory, and between heads."""
    q, k, v = (tensor.detach() for tensor in make_heads(torch.float64, 6, 2, beams=3))
    v[1, :, 4] = math.nan
    rule = torch.ones(B * 3, 6, L, M, dtype=torch.bool)
    rule[4, :, :, 4] = False  # the second beam of the second row
    rule[5, 3:, :, 4] = False  # half the heads of the third
    for beams_only in (True, False):
        given = rule[:, :1, :1] if beams_only else rule
        out = attend(q, k, v, attention_mask=Mask(given), backend=backend)
        nan = out.isnan().all(-1).all(-1)
        assert torch.equal(nan, out.isnan().any(-1).any(-1))
        expected = torch.tensor([False, False, False, True, False, True])[:, None].repeat(1, 6)
        if not beams_only:
            expected[5, 3:] = False
        assert torch.equal(nan, expected)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("l", [1, L])
@pytest.mark.parametrize("once", [False, True], ids=["in the call", "projected once"])
@pytest.mark.parametrize("layout,options", CASES, ids=str)
def test_garbage_in_a_layer(options, once, layout, l, garbage, monkeypatch, reading):
    """A slot of the memory that only some queries or rows may see, in every layout, projected once and not."""
    force(monkeypatch, layout)
    layer = make_layer(torch.float64, **options)
    x, memory = (torch.randn(B, length, width, dtype=torch.float64) for length, width in ((l, D), (M, E)))
    rule = torch.ones(B, l, M, dtype=torch.bool)
    rule[:, : max(1, l // 2), 4] = False
    far = rule[0, :, 4]
    dirty = memory.clone()
    dirty[1, 4] = garbage
    upstream = torch.randn(B, l, D, dtype=torch.float64).masked_fill(far[:, None], 0)
    results = []
    for given in (memory, dirty):
        leaves = [x.clone().requires_grad_(), given.clone().requires_grad_()]
        held: Tensor | KeyValue = leaves[1]
        if once:
            held = layer.project(leaves[1], mask=FIRST_SIX, queries=0 if "absorbed" in layout else None)
            assert not reading or "packed" not in layout or options.get("null_slot") or kind(held) == layout
        out = layer(leaves[0], held, mask=None if once else FIRST_SIX, attention_mask=rule)
        results.append([out, *gradients(out, leaves, upstream)])
    (out, *grads), (dirty_out, *dirty_grads) = results
    assert dirty_out[1, far].isnan().all() and bool(far.any()) == (l > 1)
    assert_close(dirty_out[:, ~far], out[:, ~far], torch.float64)
    # The slot's own gradient is that of a norm or a matrix at NaN.
    for grad in (grads[1], dirty_grads[1]):
        grad[1, 4] = 0
    for grad, right in zip(dirty_grads, grads, strict=True):
        assert_close(grad, right, torch.float64, "grad")


# ---- scores


@pytest.mark.parametrize("once", [False, True], ids=["in the call", "projected once"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("rule", [None, RULE], ids=["padding", "and rule"])
@pytest.mark.parametrize("layout,options", CASES, ids=str)
def test_scores_of_masked_slots_change_nothing(layout, options, rule, garbage, once, monkeypatch):
    """Invariant 5, in every layout, forward and backward; the learned temperature included."""
    force(monkeypatch, layout)
    layer = make_layer(torch.float64, score_bias=True, **options)
    x, memory = (torch.randn(B, length, width, dtype=torch.float64) for length, width in ((L, D), (M, E)))
    scores = torch.randn(B, M, dtype=torch.float64)
    results = []
    for given in (scores, scores.masked_fill(~MASK, garbage)):
        leaf = memory.clone().requires_grad_()
        if once:
            held = layer.project(leaf, mask=MASK, scores=given, queries=0 if "absorbed" in layout else None)
            out = layer(x, held, attention_mask=rule)
        else:
            out = layer(x, leaf, mask=MASK, scores=given, attention_mask=rule)
        results.append([out, *gradients(out, [leaf, *layer.parameters()], torch.ones_like(out))])
    assert results[0][0].any()
    for left, right in zip(*results, strict=True):
        assert torch.isfinite(left).all() and torch.equal(left, right)
