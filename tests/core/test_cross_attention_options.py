"""The options of `CrossAttention` by what they promise, and the masks, settings and calls it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

import mmattn
from mmattn import CrossAttention
from mmattn.core.positions import Rotary, grid
from mmattn.errors import ConfigError, MaskError, ShapeError
from tests.core.random_inputs import MASK, B, D, E, L, M, data, make_layer as make


def test_positions_are_counted_from_zero_unless_given():
    layer = make(rotary=Rotary(8))
    x, memory = data()
    expected = layer(x, memory, query_positions=torch.arange(L), memory_positions=torch.arange(M))
    assert torch.equal(layer(x, memory), expected)
    moved = layer(x, memory, query_positions=torch.arange(L) + 31, memory_positions=torch.arange(M) + 31)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(layer(x, memory, query_positions=torch.arange(L) + 31), expected, atol=1e-2)
    on_grid = make(rotary=Rotary(8, axes=2))
    places = {"query_positions": grid(1, L), "memory_positions": grid(M, 1)}
    assert on_grid(x, memory, **places).shape == x.shape


def test_a_null_slot_takes_part_of_the_attention():
    """Weights of real slots sum to less than 1, and length normalisation keeps that share as the memory grows."""
    x, memory = data()
    memory = memory[:, :1]
    shares = {}
    for length_norm in (None, 29.0):
        layer = make(null_slot=True, length_norm=length_norm)
        for times in (1, 64):
            shares[length_norm, times] = layer(x, memory.expand(-1, times, -1), return_weights=True)[1].sum(-1)
            assert (shares[length_norm, times] < 1).all()
    assert (shares[None, 64] - shares[None, 1]).max() > 0.1
    torch.testing.assert_close(shares[29.0, 64], shares[29.0, 1], rtol=0, atol=1e-5)


def test_head_scale():
    """Each head's find is multiplied; 0 leaves the output bias, and nothing where nothing is seen."""
    layer = make()
    x, memory = data()
    scale = torch.randn(6)
    with torch.no_grad():
        scaled = copy.deepcopy(layer)
        scaled.out_proj.weight.mul_(scale.repeat_interleave(8))
    torch.testing.assert_close(layer(x, memory, head_scale=scale), scaled(x, memory), rtol=0, atol=1e-5)
    nothing = layer(x, memory, mask=MASK, head_scale=torch.zeros(6))
    assert torch.equal(nothing[0], layer.out_proj.bias.expand(L, D)) and not nothing[1].any()


def test_masks_of_a_projection():
    """Invariants 1, 2: they are checked as those of a call are."""
    memory = data()[1]
    with pytest.raises(MaskError, match="mask must be bool"):
        make().project(memory, mask=torch.ones(B, M))
    with pytest.raises(ShapeError, match=r"attention_mask") as error:
        make().project(memory, mask=torch.ones(B, M + 1, dtype=torch.bool))
    assert str((B, M)) in str(error.value) and str((B, M + 1)) in str(error.value)


@pytest.mark.parametrize(
    "settings_,match",
    [
        ({"num_heads": 5}, "num_heads must divide query_dim, got 5 and 32"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"num_heads": -4}, "num_heads must be at least 1"),
        ({"num_heads": True}, "num_heads must be an int, got True"),
        ({"num_heads": 4.0}, "num_heads must be an int, got 4.0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1"),
        ({"query_dim": 0}, "query_dim must be at least 1"),
        ({"memory_dim": "8"}, "memory_dim must be an int"),
        ({"head_dim": False}, "head_dim must be an int, got False"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"dropout": float("nan")}, "dropout must be a finite number"),
        ({"length_norm": 0.5}, "length_norm must be in"),
        ({"scale": float("inf")}, "scale must be a finite number"),
        ({"backend": "flash"}, "backend must be one of 'sdpa', 'eager'; got 'flash'"),
        ({"rotary": Rotary(4)}, "rotary must be built for head_dim 8, got one for 4"),
    ],
)
def test_bad_settings(settings_, match):
    """Invariant 15: refused when the layer is made, naming what was given."""
    with pytest.raises(ValueError, match=match):
        CrossAttention(**({"query_dim": 32, "num_heads": 4} | settings_))


def test_bad_calls():
    """Invariants 2, 15: widths, rows and options that do not fit this layer, each named."""
    layer, (x, memory) = make(), data()
    kept = layer.project(memory)
    with pytest.raises(ShapeError, match=r"x must be \(b, l, 19\), got \(2, 5, 23\)"):
        layer(torch.randn(B, L, E), memory)
    with pytest.raises(ShapeError, match=r"memory must be a tensor \(b, m, 23\), got \(2, 7, 19\)"):
        layer(x, torch.randn(B, M, D))
    with pytest.raises(ShapeError, match="got list"):
        layer(x, [memory])
    with pytest.raises(ShapeError, match="multiple of them .beams., got 3 and 2"):
        layer(torch.randn(3, L, D), memory)
    with pytest.raises(ShapeError, match="got 3 and 2"):
        layer(torch.randn(3, L, D), kept)
    with pytest.raises(ShapeError, match="give them to project"):
        layer(x, kept, mask=MASK)
    with pytest.raises(ConfigError, match="has no score_bias"):
        layer(x, memory, scores=torch.zeros(B, M))
    with pytest.raises(ConfigError, match="give it scores"):
        make(score_bias=True)(x, memory)
    with pytest.raises(ShapeError, match=r"scores must be \(b, m\) = \(2, 7\), got \(7, 2\)"):
        make(score_bias=True)(x, memory, scores=torch.zeros(M, B))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"score_bias": True, "score_std": 0.0}, "score_std must be above 0"),
        ({"score_bias": True, "score_mean": float("nan")}, "score_mean must be a finite number"),
        ({"score_mean": 0.5}, "give score_bias=True, or leave them out"),
    ],
)
def test_settings_of_scores_that_are_none(options, match):
    with pytest.raises(ConfigError, match=match):
        make(**options)
    with pytest.raises(ConfigError, match=match):
        mmattn.GatedAdapter(memory_dim=8, **options)
