"""A layer among others: dtypes, autocast, dropout, checkpointing, and what its weights and its memory learn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmattn import CrossAttention
from mmattn.errors import ShapeError
from tests.core.random_inputs import DTYPES, LAYOUTS, MASK, B, D, E, L, M, data, force, make_layer as make
from tests.reference import TARGETS


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
