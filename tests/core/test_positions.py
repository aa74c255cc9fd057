"""Positions against the papers' formulas, transformers' Llama rotary and the ALiBi of Bloom and MPT."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from mmattn import positions
from mmattn.errors import ConfigError, ShapeError
from tests.reference import assert_close, rotary_reference


class TestSinusoidal:
    def test_equals_the_paper(self) -> None:
        places, dim = [0, 1, 7, 1009, 100_003], 22
        made = positions.sinusoidal(torch.tensor(places), dim)
        assert made.shape == (5, 22)
        assert made.dtype == torch.float32
        for row, place in enumerate(places):
            for i in range(dim // 2):
                angle = place / 10000 ** (2 * i / dim)
                assert float(made[row, 2 * i]) == pytest.approx(math.sin(angle), abs=2e-7)
                assert float(made[row, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=2e-7)


class TestLearned:
    def test_looks_up_and_trains_only_what_was_used(self) -> None:
        table = positions.Learned(7, 5)
        places = torch.tensor([[0, 6, 6], [2, 0, 2]])
        made = table(places)
        assert made.shape == (2, 3, 5)
        assert torch.equal(made, table.weight[places])
        made.sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad[:, 0].tolist() == [2, 0, 2, 0, 0, 0, 2]


class TestRotary:
    @pytest.mark.parametrize("base", [10000.0, 500000.0])
    @pytest.mark.parametrize("per_row", [False, True])
    def test_equals_llama(self, base: float, per_row: bool) -> None:
        b, h, l, k = 2, 3, 7, 22
        config = LlamaConfig(
            hidden_size=h * k, num_attention_heads=h, rope_parameters={"rope_type": "default", "rope_theta": base}
        )
        q, key = torch.randn(b, h, l, k), torch.randn(b, h, l, k)
        places = torch.randint(0, 4001, (b, l)) if per_row else torch.randint(0, 4001, (l,))
        cos, sin = LlamaRotaryEmbedding(config)(q, places.expand(b, l))
        theirs = apply_rotary_pos_emb(q, key, cos, sin)
        turn = positions.Rotary(k, base=base)
        for ours, other in zip((turn(q, places), turn(key, places)), theirs, strict=True):
            assert torch.isfinite(ours).all()
            torch.testing.assert_close(ours, other, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("axes", [1, 2, 3])
    @pytest.mark.parametrize("rows", [None, 1, 2])
    def test_equals_the_turn_of_complex_numbers(self, axes: int, rows: int | None) -> None:
        shape = (*((rows,) if rows else ()), 7, *((axes,) if axes > 1 else ()))
        places = torch.randint(0, 23, shape)
        x = torch.randn(2, 5, 7, 12 * axes, dtype=torch.float64, requires_grad=True)
        turned = positions.Rotary(12 * axes, base=997.0, axes=axes)(x, places)
        expected = rotary_reference(x, places, base=997.0, axes=axes)
        assert_close(turned, expected, torch.float64)
        upstream = torch.randn_like(turned)
        ours, theirs = (torch.autograd.grad(out, x, upstream)[0] for out in (turned, expected))
        assert_close(ours, theirs, torch.float64, "grad")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_turned_in_float32_also_after_half(self, dtype: torch.dtype) -> None:
        turn = positions.Rotary(22).to(dtype)
        x, places = torch.randn(2, 3, 7, 22).to(dtype), torch.randint(2000, 4001, (7,))
        turned = turn(x, places)
        assert turned.dtype == dtype
        assert torch.equal(turned, turn(x.float(), places).to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(turn(x, places), turned)

    @pytest.mark.parametrize(
        ("axes", "x", "places", "words"),
        [
            (1, (2, 3, 7, 22), (5,), r"\(7,\) or \(2, 7\) .* got \(5,\)"),
            (1, (2, 3, 7, 22), (3, 7), r"got \(3, 7\)"),
            (1, (2, 3, 7, 22), (7, 2), r"got \(7, 2\)"),
            (2, (2, 3, 7, 20), (7,), r"\(7, 2\) or \(2, 7, 2\) .* 2 axes, got \(7,\)"),
            (2, (2, 3, 7, 20), (7, 3), r"got \(7, 3\)"),
            (1, (2, 3, 7, 20), (7,), r"x must be \(b, h, l, 22\), got \(2, 3, 7, 20\)"),
            (1, (3, 7, 22), (7,), r"x must be \(b, h, l, 22\)"),
        ],
    )
    def test_sizes_that_do_not_fit(self, axes: int, x: tuple[int, ...], places: tuple[int, ...], words: str) -> None:
        turn = positions.Rotary(22 if axes == 1 else 20, axes=axes)
        with pytest.raises(ShapeError, match=words):
            turn(torch.randn(x), torch.zeros(places, dtype=torch.long))


class TestAlibi:
    @pytest.mark.parametrize("h", [1, 2, 3, 5, 7, 8, 11, 12, 16, 25, 32, 71, 128])
    def test_slopes_equal_bloom_and_mpt(self, h: int) -> None:
        slopes = positions.alibi_slopes(h)
        bloom = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), h, torch.float32)[:, 0, 1]
        mpt = -build_mpt_alibi_tensor(h, 2)[:, 0, 0]
        assert slopes.shape == (h,)
        assert slopes.dtype == torch.float32
        torch.testing.assert_close(slopes, bloom, rtol=1e-5, atol=0)
        torch.testing.assert_close(slopes, mpt, rtol=1e-5, atol=0)

    def test_bias_is_minus_the_distance(self) -> None:
        h, l, m, offset = 3, 5, 11, 4
        bias, slopes = positions.alibi(h, l, m, offset), positions.alibi_slopes(h)
        assert bias.shape == (h, l, m)
        for head in range(h):
            for i in range(l):
                assert bias[head, i].tolist() == [-float(slopes[head]) * abs(i + offset - j) for j in range(m)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: positions.sinusoidal(torch.arange(3), 7), "dim must be even.*got 7"),
        (lambda: positions.sinusoidal([1, 2], 8), "positions must be a tensor, got list"),
        (lambda: positions.sinusoidal(torch.tensor([True]), 8), "positions must be ints or floats"),
        (lambda: positions.Learned(0, 5), "num must be at least 1"),
        (lambda: positions.Learned(7, True), "dim must be an int"),
        (lambda: positions.Learned(7, 5)(torch.tensor([1.0])), "must be ints"),
        (lambda: positions.Learned(7, 5)(torch.tensor([0, 7])), "must lie in 0…6, the 7 learned ones.*larger num"),
        (lambda: positions.Learned(7, 5)(torch.tensor([-1, 3])), "must lie in 0…6"),
        (lambda: positions.Rotary(7), "multiple of 2 .*got 7"),
        (lambda: positions.Rotary(22, axes=2), "multiple of 4 .*2 axes.*got 22"),
        (lambda: positions.Rotary(8, base=0.0), "base must be above 0"),
        (lambda: positions.Rotary(8, base=float("nan")), "base must be a finite number"),
        (lambda: positions.Rotary(8, axes=0), "axes must be at least 1"),
        (lambda: positions.grid(0, 3), "height must be at least 1"),
        (lambda: positions.grid(3, 2.0), "width must be an int"),
        (lambda: positions.alibi_slopes(0), "h must be at least 1"),
        (lambda: positions.alibi(3, -1, 5), "l must be at least 0"),
        (lambda: positions.alibi(3, 5, 5, offset=0.5), "offset must be an int"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Tensor], words: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=words):
        make()
