"""What must not change what `attend` gives: order, garbage, layout, company; and sizes of nothing, values of 300."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from mmattn import attend
from tests.core.random_inputs import (
    BACKENDS,
    DTYPES,
    MASK,
    RULE,
    B,
    L,
    M,
    V,
    close,
    compare_attend as compare,
    make_heads as make,
)
from tests.reference import gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [M, 257])
def test_bitwise(dtype, backend, m):
    """Invariant 12: the same call twice, and masks that are True everywhere against none, are equal bit for bit."""
    q, k, v = make(dtype, 6, 2, m=m)
    out = attend(q, k, v, backend=backend)
    assert torch.isfinite(out).all()
    assert torch.equal(attend(q, k, v, backend=backend), out)
    yes = torch.ones(B, 6, L, m, dtype=torch.bool)
    for rules in ({"mask": yes[:, 0, 0]}, {"attention_mask": yes[0, 0]}, {"attention_mask": yes}):
        assert torch.equal(attend(q, k, v, backend=backend, **rules), out), list(rules)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rearranged(dtype, backend):
    """Invariants 7, 13, 14: slots permuted, doubled, or joined by masked ones; rows and queries one at a time."""
    mask = torch.rand(B, M) < 0.7
    mask[:, 2] = True
    q, k, v = (tensor.detach() for tensor in make(dtype, 6, 2))
    out = attend(q, k, v, mask=mask, backend=backend)
    order = torch.randperm(M)
    close(attend(q, k[:, :, order], v[:, :, order], mask=mask[:, order], backend=backend), out)
    twice = [torch.cat([tensor, tensor], 2) for tensor in (k, v)]
    close(attend(q, *twice, mask=torch.cat([mask, mask], 1), backend=backend), out)
    junk = [torch.cat([tensor, 50 * torch.randn(B, 2, 7, tensor.shape[3]).to(dtype)], 2) for tensor in (k, v)]
    close(attend(q, *junk, mask=F.pad(mask, (0, 7)), backend=backend), out)
    rows = [attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask=mask[i : i + 1], backend=backend) for i in range(B)]
    close(torch.cat(rows), out)
    queries = [attend(q[:, :, i : i + 1], k, v, mask=mask, backend=backend) for i in range(L)]
    close(torch.cat(queries, 2), out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 6e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_behind_the_mask(dtype, garbage, backend):
    """Invariant 7: what lies in masked slots changes nothing, forward or backward, bit for bit."""
    clean = make(dtype, 6, 2)
    dirty = [tensor.detach().clone() for tensor in clean]
    for tensor in dirty[1:]:
        tensor.masked_fill_(~MASK[:, None, :, None], garbage)
    upstream = torch.randn(B, 6, L, V).to(dtype)
    results = []
    for inputs in (clean, dirty):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = attend(*leaves, mask=MASK, attention_mask=RULE, backend=backend)
        results.append([out, *gradients(out, leaves, upstream)])
    for mine, other in zip(*results, strict=True):
        assert torch.isfinite(other).all() and torch.equal(mine, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("b,l,m", [(B, L, 0), (B, 0, M), (0, L, M), (0, 0, 0)])
def test_empty(b, l, m, dtype, backend):
    """Invariants 10, 11: nothing to look at gives exactly 0, nothing to ask gives nothing; large values included."""
    inputs = make(dtype, 6, 2, b=b, l=l, m=m, k=64)
    with torch.no_grad():
        inputs[0].fill_(6e4)
    out = attend(*inputs, mask=torch.ones(b, m, dtype=torch.bool), backend=backend)
    assert out.shape == (b, 6, l, V) and out.dtype == dtype and not out.any()
    for grad, tensor in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert grad.shape == tensor.shape and not grad.any()
    assert attend(*inputs, return_weights=True)[1].shape == (b, 6, l, m)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_large_values(dtype, backend):
    """Invariant 16: queries and keys of 300 do not overflow, forward or backward."""
    q, k, v = make(dtype, 6, 2, k=64)
    with torch.no_grad():
        q.copy_(300 * q.sign())
        k.copy_(300 * k.sign())
    out = attend(q, k, v, mask=MASK, backend=backend)
    assert torch.isfinite(out).all() and out[0].any()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.isfinite(grad).all()


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "sliced": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("m", [31, 32, 33, 65, 577])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts(layout, m, device="cpu"):
    """Invariant 17: keys and values that are not contiguous, or share storage, count as their contiguous copies do."""
    mask = torch.rand(B, m, device=device) < 0.6
    mask[1] = False
    for dtype, masked in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        q, k, v = (tensor.detach().to(device) for tensor in make(dtype, 6, 2, m=m, k=16, v=16))
        k, v = LAYOUTS[layout](k), LAYOUTS[layout](v)
        assert not (k.is_contiguous() and v.is_contiguous())
        rule = mask if masked else None
        found = attend(q, k, v, mask=rule)
        close(found, attend(q, k.contiguous(), v.contiguous(), mask=rule))
        if masked:
            assert not found[1].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layouts_on_cuda():
    """Invariant 17: the sizes at which CUDA kernels have been wrong."""
    for layout, m in itertools.product(LAYOUTS, (31, 32, 33, 65, 577)):
        test_layouts(layout, m, "cuda")


@settings(max_examples=60)
@given(data=st.data())
def test_any_shape(data):
    """Invariants 7, 13, 14 and the numeric targets over random sizes, dtypes, layouts and masks, both backends."""
    draw = data.draw
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    torch.manual_seed(number(0, 10**6))
    dtype, beams, g = draw(st.sampled_from(DTYPES)), number(1, 3), number(1, 3)
    b, l, m, h = number(1, 3), number(1, 6), number(0, 9), g * number(1, 3)
    widths = {"k": number(1, 9), "v": number(1, 9)}
    inputs = make(dtype, h, g, draw(st.sampled_from([1.0, 4.0])), b=b, l=l, m=m, beams=beams, **widths)
    if draw(st.booleans()):
        inputs = (inputs[0], *(tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in inputs[1:]))
    given_rules: dict = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        given_rules["mask"] = torch.rand(b, m) < 0.6
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(l, m), (b * beams, l, m), (b * beams, h, l, m)]))
        given_rules["attention_mask"] = torch.rand(shape) < 0.6
    bias = (torch.randn(draw(st.sampled_from([(h, l, m), (b * beams, 1, 1, m)]))).to(dtype).requires_grad_(),)
    out, *_ = compare((*inputs, *(bias if draw(st.booleans()) else ())), beams, floor=1e-1, **given_rules)
    if not given_rules["causal"] and "attention_mask" not in given_rules and out.any():
        mask = given_rules.get("mask", torch.ones(b, m, dtype=torch.bool))
        q, k, v = (tensor.detach() for tensor in inputs)
        order, plain = torch.randperm(m), attend(q, k, v, mask=mask)
        close(attend(q, k[:, :, order], v[:, :, order], mask=mask[:, order]), plain)
        close(attend(q, torch.cat([k, k], 2), torch.cat([v, v], 2), mask=torch.cat([mask, mask], 1)), plain)
        more = [torch.cat([tensor, tensor.flip(2)], 2) for tensor in (k, v)]
        close(attend(q, *more, mask=F.pad(mask, (0, m))), plain)
