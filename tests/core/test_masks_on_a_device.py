"""Padding on a device, where no value is looked at: the mask is added to the scores, and rows without slots give 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmattn import CrossAttention
from tests.core.random_inputs import MASKS, D, E, compare_layer, data, force
from tests.device import act_as_device

BIASES: dict[str, dict[str, Any]] = {
    "no bias": {},
    "biases": {"bias": True},
    "of the output": {"out_bias": True},
    "of the projections": {"bias": True, "out_bias": False},
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    act_as_device(monkeypatch)


def call(layer: CrossAttention, x: Tensor, memory: Tensor, *, mask: Tensor) -> Any:
    return layer(x, memory, mask=mask)


def call_projected(layer: CrossAttention, x: Tensor, memory: Tensor, *, mask: Tensor) -> Any:
    return layer(x, layer.project(memory, mask=mask))


@pytest.mark.parametrize("through", [call, call_projected], ids=["in the call", "projected once"])
@pytest.mark.parametrize("layout", ["padded", "absorbed"])
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("h,g", [(5, 5), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers(dtype, h, g, biases, layout, through, monkeypatch):
    """Invariant 207: forward and backward, beams included; padding may hold anything."""
    force(monkeypatch, layout)
    layer = CrossAttention(D, E, h, num_kv_heads=g, head_dim=8, **BIASES[biases]).to(dtype)
    for beams in (1, 3):
        x, memory = data(beams, l=17)
        for mask in MASKS.values():
            out = compare_layer(layer, x, memory, through=through, mask=mask)
            assert not out[beams : 2 * beams].any() and out[:beams].any(), "exactly 0, the output bias included"
            spoilt = memory.to(dtype).masked_fill(~mask[..., None], torch.nan)
            assert torch.equal(through(layer, x.to(dtype), spoilt, mask=mask), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(dtype: torch.dtype) -> None:
    """Invariant 207: a memory that was projected in float32 is read in half precision: rows without slots stay 0."""
    layer, (x, memory), mask = CrossAttention(D, E, 5, head_dim=8), data(l=17), MASKS["in front"]
    before = layer.project(memory, mask=mask)
    with torch.autocast("cpu", dtype):
        for kept in (before, layer.project(memory, mask=mask)):
            out = layer(x, kept)
            assert out.isfinite().all() and out[0].any() and not out[1].any()
