"""The definition itself, against torch's own attention, and against inputs chosen to break it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn import masks
from tests.reference import (
    TARGETS,
    assert_close,
    attend_reference,
    cross_attention_reference,
    gradients,
    rms_norm_reference,
)


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


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
def test_what_lies_in_masked_slots_has_no_influence(garbage: float) -> None:
    q, key, value = heads((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 7))
    mask = masks.padding([4, 0], 11).tensor[:, 0, 0]
    out, weights = attend_reference(q, key, value, mask=mask)
    hidden = ~mask[:, None, :, None]
    bad = [each.detach().masked_fill(hidden, garbage).requires_grad_() for each in (key, value)]
    dirty, dirty_weights = attend_reference(q, *bad, mask=mask)
    assert torch.equal(out, dirty)
    assert torch.equal(weights, dirty_weights)
    assert out[0].all()
    assert not out[1].any()
    upstream = torch.randn_like(out)
    for clean, other in zip(
        gradients(out, (q, key, value), upstream), gradients(dirty, (q, *bad), upstream), strict=True
    ):
        assert torch.equal(clean, other)


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


@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_equals_multihead_attention(bias: bool) -> None:
    b, l, m, d, e, h = 2, 5, 7, 12, 11, 3
    layer = nn.MultiheadAttention(d, h, bias=bias, kdim=e, vdim=e, batch_first=True, dtype=torch.float64)
    x, memory = heads((b, l, d), (b, m, e))
    mask = masks.padding([7, 3], m).tensor[:, 0, 0]
    state = {f"{n}_proj.weight": getattr(layer, f"{n}_proj_weight") for n in "qkv"}
    state["out_proj.weight"] = layer.out_proj.weight
    if bias:
        nn.init.normal_(layer.in_proj_bias)
        nn.init.normal_(layer.out_proj.bias)
        state |= {f"{n}_proj.bias": part for n, part in zip("qkv", layer.in_proj_bias.chunk(3), strict=True)}
        state["out_proj.bias"] = layer.out_proj.bias
    expected, expected_weights = layer(x, memory, memory, key_padding_mask=~mask, average_attn_weights=False)
    out, weights = cross_attention_reference(state, x, memory, num_heads=h, mask=mask)
    assert_close(out, expected.detach(), torch.float64)
    assert_close(weights, expected_weights.detach(), torch.float64)


def test_rms_norm_equals_torch() -> None:
    norm = nn.RMSNorm(13, eps=1e-6, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5, 13, dtype=torch.float64) * 1e-3
    assert_close(rms_norm_reference(x, norm.weight, 1e-6), norm(x).detach(), torch.float64)


class TestAssertClose:
    @pytest.mark.parametrize("dtype", TARGETS)
    @pytest.mark.parametrize("kind", ["forward", "grad"])
    def test_either_measure_can_fail(self, dtype: torch.dtype, kind: str) -> None:
        expected = torch.ones(1009, dtype=torch.float64)
        most, typical = TARGETS[dtype][kind]
        assert_close(expected * (1 + typical * 0.9), expected, dtype, kind)
        with pytest.raises(AssertionError, match="norm error"):
            assert_close(expected * (1 + typical * 1.1), expected, dtype, kind)
        spiked = expected.clone()
        spiked[7] += most * 1.1
        with pytest.raises(AssertionError, match="max error"):
            assert_close(spiked, expected, dtype, kind)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_is_never_close(self, value: float) -> None:
        bad = torch.tensor([1.0, value], dtype=torch.float64)
        with pytest.raises(AssertionError, match="1 values of forward are not finite"):
            assert_close(bad, torch.ones(2, dtype=torch.float64), torch.bfloat16)
        with pytest.raises(AssertionError, match="reference itself"):
            assert_close(torch.ones(2), bad, torch.bfloat16)

    def test_shapes_do_not_broadcast_and_zero_means_zero(self) -> None:
        zeros = torch.zeros(3, 5, dtype=torch.float64)
        assert_close(zeros.float(), zeros, torch.float32)
        with pytest.raises(AssertionError, match="shape"):
            assert_close(zeros[:1].float(), zeros, torch.float32)
        with pytest.raises(AssertionError, match="exactly 0"):
            assert_close(zeros.float() + 1e-30, zeros, torch.float32)
        with pytest.raises(AssertionError, match="must be float64"):
            assert_close(zeros.float(), zeros.float(), torch.float32)
