"""The options of `CrossAttention`, what must not change what it gives, and a layer among others in training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mmattn
from mmattn import CrossAttention
from mmattn.core.positions import Rotary, grid
from mmattn.errors import ConfigError, MaskError, ShapeError
from tests.core.random_inputs import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    MASK,
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
from tests.reference import TARGETS, gradients


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
    layer, scored, (x, memory) = make(), make(score_bias=True), data()
    kept, three, scores = layer.project(memory), torch.randn(3, L, D), torch.zeros(B, M)
    for call, error, words in (
        (lambda: layer(torch.randn(B, L, E), memory), ShapeError, r"x must be \(b, l, 19\), got \(2, 5, 23\)"),
        (lambda: layer(x, torch.randn(B, M, D)), ShapeError, r"must be a tensor \(b, m, 23\), got \(2, 7, 19\)"),
        (lambda: layer(x, [memory]), ShapeError, "got list"),
        (lambda: layer(three, memory), ShapeError, "multiple of them .beams., got 3 and 2"),
        (lambda: layer(three, kept), ShapeError, "got 3 and 2"),
        (lambda: layer(x, kept, mask=MASK), ShapeError, "give them to project"),
        (lambda: layer(x, memory, scores=scores), ConfigError, "has no score_bias"),
        (lambda: scored(x, memory), ConfigError, "give it scores"),
        (lambda: scored(x, memory, scores=scores.T), ShapeError, r"scores must be \(b, m\) = \(2, 7\), got \(7, 2\)"),
    ):
        with pytest.raises(error, match=words):
            call()


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


@pytest.mark.parametrize("memory_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layer_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES[1:], ids=str)
def test_mixed_dtypes(x_dtype, layer_dtype, memory_dtype):
    """Invariant 18: memory and x are cast to the weights' dtype, the output to that of x."""
    layer = make(layer_dtype, score_bias=True, null_slot=True, qk_norm=True)
    x, memory = data()
    given_ = {"mask": MASK, "scores": torch.randn(B, M).to(memory_dtype)}
    out = layer(x.to(x_dtype), memory.to(memory_dtype), **given_)
    assert out.dtype == x_dtype and torch.isfinite(out).all() and not out[1].any()
    expected = layer.double()(x.to(x_dtype).double(), memory.to(memory_dtype).double(), **given_)
    loosest = max(TARGETS[each]["forward"][0] for each in (x_dtype, layer_dtype, memory_dtype))
    assert (out.double() - expected).abs().max() <= 2 * loosest * expected.abs().max()


def test_another_device():
    """Invariant 18: x and memory on two devices are refused, naming both."""
    x, memory = data()
    with pytest.raises(ShapeError, match="x is on cpu and memory on meta"):
        make()(x, memory.to("meta"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(x_dtype, layout, monkeypatch):
    """Invariant 19: under bf16 autocast it runs, trains, and the stream beside it keeps its dtype."""
    force(monkeypatch, layout)
    for options in ({"score_bias": True}, {"qk_norm": True, "null_slot": True, "length_norm": 5.0, "score_bias": True}):
        layer = make(**options)
        x, memory = data()
        given_ = {"mask": MASK, "scores": torch.randn(B, M)}
        expected = layer(x, memory, **given_)
        seen: list[torch.dtype] = []
        after = nn.Identity()
        after.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0].dtype))
        x = x.to(x_dtype)
        with torch.autocast("cpu", torch.bfloat16):
            out = after(x + layer(x, memory, **given_)) - x
        assert seen == [x_dtype] and torch.isfinite(out).all()
        assert (out.float() - expected).abs().max() <= 5e-2 * expected.abs().max()
        out.sum().backward()
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                assert torch.isfinite(parameter.grad).all() and parameter.grad.dtype == torch.float32, name
        assert layer.kv_proj.v_proj.weight.grad.any() and layer.kv_proj.score_scale.grad.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_values(dtype, layout, monkeypatch):
    """Invariant 16: queries and keys of 300 in half precision stay finite, forward and backward."""
    force(monkeypatch, layout)
    layer = CrossAttention(8, 8, 1).to(dtype)
    with torch.no_grad():
        for part in (layer.q_proj, layer.kv_proj.k_proj):
            part.weight.copy_(torch.eye(8))
    x, memory = torch.full((B, L, 8), 300.0, dtype=dtype), torch.full((B, M, 8), 300.0, dtype=dtype)
    memory[:, ::2] *= -1
    memory.requires_grad_()
    out = layer(x, memory, mask=MASK)
    (out / 1000).sum().backward()
    assert torch.isfinite(out).all() and out[0].any() and torch.isfinite(memory.grad).all()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout(layout, backend, monkeypatch):
    """Invariant 20: training draws anew, evaluation does not, before and after training alike."""
    force(monkeypatch, layout)
    layer = make(dropout=0.5, backend=backend)
    x, memory = data()
    for mask in (MASK, None):
        before = layer.eval()(x, memory, mask=mask)
        assert torch.equal(layer(x, memory, mask=mask), before)
        layer.train()
        drawn = [layer(x, memory, mask=mask) for _ in range(2)]
        assert not torch.equal(*drawn) and not torch.equal(drawn[0], before)
        assert bool(drawn[0][1].any()) == (mask is None)
        assert torch.equal(layer.eval()(x, memory, mask=mask), before)


@pytest.mark.parametrize("mode", ["plain", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainable_projector_learns(layout, mode, monkeypatch):
    """Invariant 23: the gradient reaches what made the memory, through both kinds of checkpointing."""
    force(monkeypatch, layout)
    layer, projector = make(), nn.Linear(11, E)
    x, raw = torch.randn(B, L, D), torch.randn(B, M, 11)

    def step(x: Tensor, memory: Tensor) -> Tensor:
        return layer(x, memory, mask=MASK)

    expected = torch.autograd.grad(step(x, projector(raw)).square().sum(), projector.weight)[0]
    memory = projector(raw)
    if mode == "plain":
        out = step(x, memory)
    else:
        out = checkpoint(step, x, memory, use_reentrant=mode.startswith("reentrant"))
    out.square().sum().backward()
    assert expected.any() and torch.equal(projector.weight.grad, expected)


def test_a_wrapped_projection_is_used_as_it_is(monkeypatch):
    """A projection that somebody replaced (LoRA) is called, not read around."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer, (x, memory) = make(bias=False), data()
    force(monkeypatch, "padded")
    expected = 2 * layer(x, memory)
    doubled = Doubled(E, 16, bias=False)
    doubled.weight = layer.kv_proj.v_proj.weight
    layer.kv_proj.v_proj = doubled
    force(monkeypatch, "absorbed")
    torch.testing.assert_close(layer(x, memory), expected, rtol=0, atol=1e-5)


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
