"""The definition itself, against torch's own attention, and against inputs chosen to break it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn import masks
from tests.reference import (
    assert_close,
    attend_reference,
    cross_attention_reference,
    gradients,
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
