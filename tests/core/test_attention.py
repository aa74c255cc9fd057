"""`attend` against the slow definition, and that against torch: values, gradients, masks, biases, dropout, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmattn import attend, masks
from mmattn.errors import ConfigError, MaskError, ShapeError
from tests.core.random_inputs import (
    BACKENDS,
    DTYPES,
    MASK,
    RULE,
    B,
    L,
    M,
    close,
    compare_attend as compare,
    make_heads as make,
)
from tests.reference import assert_close, attend_reference, gradients

HEADS = [(5, 5), (6, 2), (3, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("h,g", HEADS)
def test_gradcheck(h, g, backend):
    """Invariant 4: numeric gradients agree in float64 with a row and a query that see nothing."""
    q, k, v = make(torch.float64, h, g, l=3, m=4, k=3, v=2)
    mask = torch.tensor([[True, False, True, True], [False] * 4])
    rule = torch.tensor([[False] * 4, [True, True, False, False], [True] * 4])
    bias = torch.randn(B, h, 3, 4, dtype=torch.float64, requires_grad=True)
    for settings_ in ({}, {"mask": mask}, {"mask": mask, "attention_mask": rule}):
        assert torch.autograd.gradcheck(
            lambda q, k, v, bias, rules=settings_: attend(q, k, v, bias=bias, backend=backend, **rules),
            (q, k, v, bias),
            eps=1e-6,
            atol=1e-8,
            rtol=1e-6,
        )


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("h,g", HEADS)
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(dtype, size, h, g, masked):
    """Invariants 4, 9: both backends within the numeric targets, forward and backward, with a row that sees nothing."""
    out, grad_q, grad_k, grad_v = compare(make(dtype, h, g, size), mask=MASK if masked else None)
    if masked:
        assert not out[1].any() and out[0].any(), "the row that sees nothing is exactly 0"
        assert not grad_q[1].any() and not grad_k[1].any() and not grad_v[1].any()
        assert not grad_k[0][:, ~MASK[0]].any() and grad_k[0][:, MASK[0]].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("h,g", HEADS)
def test_beams_read_the_row_they_belong_to(h, g, dtype):
    """Row i of the queries reads row i // beams of the memory: as with copies per beam, without making them."""
    compare(make(dtype, h, g, beams=3), beams=3)
    out, *_ = compare(make(dtype, h, g, beams=3), beams=3, mask=MASK)
    assert not out[3:].any() and out[:3].abs().amax((1, 2, 3)).all()


def rules(h: int, rows: int) -> dict[str, Tensor | masks.Mask]:
    each = torch.rand(rows, h, L, M) < 0.5
    each[0, :, 1] = each[-1, 0, 0] = False
    each[0, :, 0, 0] = rows > 1  # a slot that MASK shows
    return {
        "(l, m)": RULE,
        "(b, l, m)": each[:, 0],
        "(b, h, l, m)": each,
        "Mask (l, m)": masks.causal(L, M) & ~masks.window(L, M, 2),
        "Mask (b, 1, l, m)": masks.Mask(each[:, :1]),
        "Mask (b, 1, 1, m)": masks.padding_mask(each[:, 0, 0]),
        "Mask (l, 1)": masks.Mask(RULE[:, :1]),
    }


@pytest.mark.parametrize("padded", [False, True], ids=["alone", "with padding"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("h,g", HEADS)
@pytest.mark.parametrize("kind", list(rules(1, 1)))
def test_rules_per_query(kind, h, g, beams, padded):
    """Invariant 4: attention masks of every shape, alone and with padding; queries that see nothing give exactly 0."""
    rule = rules(h, B * beams)[kind]
    inputs = make(torch.float32, h, g, beams=beams)
    mask = MASK if padded else None
    out, *_ = compare(inputs, beams, attention_mask=rule, mask=mask)
    whole = rule.tensor if isinstance(rule, masks.Mask) else rule
    whole = (whole[:, None] if whole.dim() == 3 else whole).expand(B * beams, h, L, M)
    if padded:
        whole = whole & MASK.repeat_interleave(beams, 0)[:, None, None]
    blind = ~whole.any(-1)
    assert blind.any() and not blind.all(), "there must be queries of both kinds"
    assert not out[blind].any()


@pytest.mark.parametrize("l,m", [(5, 5), (5, 7), (7, 5), (1, 7)])
@pytest.mark.parametrize("h,g", HEADS)
@pytest.mark.parametrize("beams", [1, 2])
def test_causal(l, m, h, g, beams):
    """Query i sees slots up to i + m − l, grouped heads and beams too; earlier queries of a longer text see nothing."""
    out, *_ = compare(make(torch.float32, h, g, l=l, m=m, beams=beams), beams, causal=True)
    if l > m:
        assert not out[:, :, : l - m].any()
    mask = torch.rand(B, m) < 0.6
    mask[1] = False
    compare(make(torch.float32, h, g, l=l, m=m, beams=beams), beams, causal=True, mask=mask)


@pytest.mark.parametrize("shape", [(M,), (L, M), (6, L, M), (B, 1, 1, M), (B, 6, L, M)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bias(shape, dtype):
    """Added to the scaled scores, of every shape that broadcasts; its gradient is right too."""
    bias = (2 * torch.randn(shape)).to(dtype).requires_grad_()
    compare((*make(dtype, 6, 2), bias))
    compare((*make(dtype, 6, 2), bias), mask=MASK, attention_mask=RULE)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_no_more_than_twice_the_error_of_torch(dtype, backend, size, masked):
    """Invariant 9: the second rule: at most twice the error of torch's plain kernel in the same dtype, forward and
    backward.

    Gradients by the norm alone: the single worst value of torch's own fused kernels is up to seven times that of its
    plain one, because they make the weights a second time from a rounded sum.
    """
    inputs = make(dtype, 4, 4, size, l=64, m=257, k=64, v=64)
    mask = torch.rand(B, 257) < 0.5 if masked else None
    upstream = torch.randn(B, 4, 64, 64).to(dtype)

    def plain(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*inputs, None if mask is None else mask[:, None, None])

    def everything(function, upstream: Tensor, inputs) -> list[Tensor]:
        out = function(*inputs)
        return [out, *gradients(out, inputs, upstream)]

    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = everything(plain, upstream.double(), wide)
    theirs = everything(plain, upstream, inputs)
    ours = everything(lambda q, k, v: attend(q, k, v, mask=mask, backend=backend), upstream, inputs)
    for name, mine, other, truth in zip(("out", "q", "k", "v"), ours, theirs, exact, strict=True):
        assert torch.isfinite(mine).all()
        truth = truth.detach()
        for order in (2, math.inf) if name == "out" else (2,):
            error, plain_error = (
                float((value.detach() - truth).norm(order) / truth.norm(order)) for value in (mine, other)
            )
            assert error <= max(2 * plain_error, torch.finfo(dtype).eps), f"{name}: {error:.2e}, {plain_error:.2e}"


def test_dropout():
    """Invariant 20: drops weights at random; the weights one asked for are those before dropping; 0 drops nothing."""
    q, k, v = (tensor.detach() for tensor in make(torch.float32))
    whole, weights = attend(q, k, v, return_weights=True)
    for backend in BACKENDS:
        torch.manual_seed(1)
        many = torch.stack([attend(q, k, v, dropout=0.5, backend=backend) for _ in range(800)])
        assert not torch.equal(many[0], many[1])
        assert (many.mean(0) - whole).abs().max() < 0.3 * many.std(0).max()
    assert torch.equal(attend(q, k, v, dropout=0.5, return_weights=True)[1], weights)


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "sliced": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("m", [31, 32, 33, 65, 577])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts(layout, m):
    """Invariant 17: keys and values that are not contiguous, or share storage, count as their contiguous copies do."""
    mask = torch.rand(B, m) < 0.6
    mask[1] = False
    for dtype, masked in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        q, k, v = (tensor.detach() for tensor in make(dtype, 6, 2, m=m, k=16, v=16))
        k, v = LAYOUTS[layout](k), LAYOUTS[layout](v)
        assert not (k.is_contiguous() and v.is_contiguous())
        rule = mask if masked else None
        found = attend(q, k, v, mask=rule)
        close(found, attend(q, k.contiguous(), v.contiguous(), mask=rule))
        if masked:
            assert not found[1].any()


@pytest.mark.parametrize("name", ["mask", "attention_mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.long, torch.uint8], ids=str)
def test_mask_of_another_dtype(name, dtype):
    """Invariant 1: masks must be bool; the message says what came and who converts it."""
    q, k, v = make()
    given = torch.ones(B if name == "mask" else L, M, dtype=dtype)
    with pytest.raises(MaskError, match=f"{name} must be bool, True = attend; got {str(dtype)[6:]}.*from_huggingface"):
        attend(q, k, v, **{name: given})
    with pytest.raises(TypeError, match="list"):
        attend(q, k, v, **{name: given.tolist()})


@pytest.mark.parametrize("shape", [(L, M), (M,), (B,), (B, 1), (M, B), (B, M + 1), (1, M), (B, 1, M), (B, 1, 1, M)])
def test_mask_of_another_shape(shape):
    """Invariant 2: a padding mask is (b, m) and nothing else; the message names both shapes and the other mask."""
    with pytest.raises(ShapeError, match="attention_mask") as error:
        attend(*make(), mask=torch.ones(shape, dtype=torch.bool))
    assert str((B, M)) in str(error.value) and str(shape) in str(error.value)


@pytest.mark.parametrize("shape", [(B, M), (M,), (M, L), (1, M), (L, 1), (3, L, M), (B, 2, L, M), (1, 1, 1, L, M)])
def test_attention_mask_of_another_shape(shape):
    """Invariant 2: an attention mask is never a padding mask by chance."""
    with pytest.raises(ShapeError, match="padding mask") as error:
        attend(*make(), attention_mask=torch.ones(shape, dtype=torch.bool))
    assert str((L, M)) in str(error.value) and str(shape) in str(error.value)


def test_masks_when_rows_and_queries_are_as_many():
    """Invariant 2: with b = l the name alone decides: mask is per row, attention_mask per query."""
    both = torch.rand(L, M) < 0.5
    both[2] = False
    by_row, *_ = compare(make(torch.float32, b=L), mask=both)
    by_query, *_ = compare(make(torch.float32, b=L), attention_mask=both)
    assert not by_row[2].any() and by_row[0, :, 2].any()
    assert not by_query[:, :, 2].any() and by_query[2, :, 0].any()


def test_other_bad_input():
    """Invariants 15, 18: sizes, dtypes, names and biases that do not fit, each named."""
    q, k, v = make()
    for wrong, match in (
        ((q[0], k, v), "needs q"),
        ((q, k, v[:, :, :-1]), "must agree"),
        ((q[..., :-1], k, v), "must agree"),
        ((q[:, :3], k[:, :2], v[:, :2]), "divide heads, got 2 and 3"),
        ((q, k[:, :0], v[:, :0]), "divide heads, got 0 and 5; each needs one at least"),
        ((q[:, :0], k, v), "divide heads, got 5 and 0"),
        ((q[:, :0], k[:, :0], v[:, :0]), "divide heads, got 0 and 0"),
        ((q[..., :0], k[..., :0], v), "at least 1 wide, got q .*5, 0., k"),
        ((q, k, v[..., :0]), "at least 1 wide, .* v .*7, 0."),
        ((torch.cat([q, q[:1]]), k, v), "multiple of them .beams., got 3 and 2"),
        ((q, k.float(), v), "one dtype, got torch.float64, torch.float32, torch.float64"),
        ((q, k.to("meta"), v.to("meta")), "one device, got cpu, meta, meta"),
    ):
        with pytest.raises(ShapeError, match=match):
            attend(*wrong)
    with pytest.raises(ConfigError, match="'sdpa', 'eager'; got 'flash'"):
        attend(q, k, v, backend="flash")
    for dropout in (-1, 1.0, 2, math.nan, True):
        with pytest.raises(ConfigError, match="dropout must be"):
            attend(q, k, v, dropout=dropout)
    with pytest.raises(MaskError, match="a mask is attention_mask"):
        attend(q, k, v, bias=MASK[:, None, None])
    for shape in ((L, M + 1), (3, L, M), (3, 1, L, M), (1, 1, 1, L, M)):
        with pytest.raises(ShapeError, match=r"broadcastable to \(b, h, l, m\) = \(2, 5, 5, 7\)"):
            attend(q, k, v, bias=torch.zeros(shape))


def heads(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(each, dtype=dtype, requires_grad=True) for each in sizes]


@pytest.mark.parametrize("grouped", [False, True])
def test_equals_torch_with_everything_at_once(grouped: bool) -> None:
    b, h, g, l, m, k, v = 2, 6, 3 if grouped else 6, 5, 7, 11, 13
    q, key, value, bias = heads((b, h, l, k), (b, g, m, k), (b, g, m, v), (h, l, m))
    mask = masks.padding([7, 4], m).tensor[:, 0, 0]
    rule = torch.rand(b, l, m) < 0.8
    rule[..., 0] = True
    out, weights = attend_reference(q, key, value, mask=mask, attention_mask=rule, bias=bias, scale=0.3)
    seen = mask[:, None, None] & rule[:, None]
    added = bias.expand(b, h, l, m).masked_fill(~seen, float("-inf"))
    theirs = F.scaled_dot_product_attention(q, key, value, added, scale=0.3, enable_gqa=grouped)
    upstream = torch.randn_like(out)
    assert_close(out, theirs.detach(), torch.float64)
    for ours, other in zip(
        gradients(out, (q, key, value, bias), upstream), gradients(theirs, (q, key, value, bias), upstream), strict=True
    ):
        assert_close(ours, other, torch.float64, "grad")
    torch.testing.assert_close(weights.sum(-1), torch.ones(b, h, l, dtype=torch.float64))
    assert not weights.masked_select(~seen).any()
    assert weights.masked_select(seen).gt(0).all()


def test_null_slot_takes_its_share_and_rescues_nobody() -> None:
    b, h, g, l, m, k, v = 2, 6, 3, 5, 7, 11, 13
    q, key, value, null_key, null_value = heads((b, h, l, k), (b, g, m, k), (b, g, m, v), (g, k), (g, v))
    mask = torch.tensor([[True] * m, [False] * m])
    out, weights = attend_reference(q, key, value, mask=mask, null_key=null_key, null_value=null_value)
    longer = [
        torch.cat((each, null[None, :, None].expand(b, g, 1, -1)), dim=2)
        for each, null in ((key, null_key), (value, null_value))
    ]
    expected = F.scaled_dot_product_attention(q, *longer, enable_gqa=True)
    assert_close(out[0], expected[0].detach(), torch.float64)
    assert weights[0].sum(-1).lt(1).all()
    assert not out[1].any()
