"""SeriesEncoder: patches against a slow definition, missing values, streams, and what is no series."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn.encoders import SeriesEncoder
from mmattn.errors import ConfigError, NonFiniteError, ShapeError
from tests.encoders.pieces import cut


def with_gaps(length: int, channels: int, share: float = 0.2) -> Tensor:
    series = 3 * torch.randn(length, channels).cumsum(0) + 100
    return torch.where(torch.rand(length, channels) < share, math.nan, series)


def definition(series: Tensor, patch: int, normalization: str, features: int) -> tuple[list[list[float]], list[bool]]:
    """Tokens and which of them are real, written as loops over numbers."""
    length, channels = series.shape
    values = [[float(value) for value in step] for step in series]
    tokens, real = [], []
    for number in range(math.ceil(length / patch)):
        first, last = number * patch, (number + 1) * patch
        until = {"series": length, "running": min(last, length)}[normalization]
        mean, deviation = [0.0] * channels, [1.0] * channels
        for c in range(channels):
            seen = [step[c] for step in values[:until] if not math.isnan(step[c])]
            mean[c] = sum(seen) / len(seen) if seen else 0.0
            deviation[c] = math.sqrt(sum((x - mean[c]) ** 2 for x in seen) / len(seen)) if seen else 0.0
        normal, flags = [], []
        for step in range(first, last):
            for c in range(channels):
                value = values[step][c] if step < length else math.nan
                scale = deviation[c] + 1e-5 * abs(mean[c])
                flags.append(float(not math.isnan(value)))
                normal.append(0.0 if math.isnan(value) else (value - mean[c]) / (scale or 1.0))
        angles = [number / 10000 ** (i / (features // 2)) for i in range(features // 2)]
        position = [*map(math.sin, angles), *map(math.cos, angles)]
        tokens.append([*normal, *flags, *map(math.asinh, mean), *map(math.asinh, deviation), *position])
        real.append(any(flags))
    return tokens, real


@pytest.mark.parametrize("normalization", ["series", "running"])
def test_equals_the_slow_definition(normalization: str) -> None:
    """Invariant 100."""
    series = [with_gaps(31, 3), with_gaps(11, 3, 0.7), with_gaps(5, 3)]
    series[1][5:10], series[1][10] = math.nan, 97.0
    series[0][:, 1] = math.nan
    encoder = SeriesEncoder(5, 3, normalization=normalization, position_features=6)
    memory = encoder(series)
    assert encoder.dim == memory.dim == 2 * 5 * 3 + 2 * 3 + 6
    assert memory.mask is not None
    for row, one in enumerate(series):
        tokens, real = definition(one, 5, normalization, 6)
        found = memory.tokens[row, : len(tokens)]
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.double(), torch.tensor(tokens).double(), atol=1e-4, rtol=1e-5)
        assert memory.mask[row].tolist() == real + [False] * (memory.length - len(real))
    assert not memory.mask[1, 1] and memory.mask[1, 2]


def test_what_is_not_observed_changes_nothing() -> None:
    """Invariant 100: neither the value under a gap, nor a patch without values, nor what pads a row."""
    series = with_gaps(29, 2, 0.0)
    series[7:21] = math.nan
    encoder = SeriesEncoder(7, 2)
    memory = encoder([series, series[:9]])
    layer = mmattn.CrossAttention(13, encoder.dim, 1)
    x = torch.randn(2, 3, 13)
    seen = layer(x, memory.tokens, mask=memory.mask)
    spoiled = memory.tokens.clone()
    assert memory.mask is not None
    spoiled[~memory.mask] = math.nan
    assert memory.mask.tolist() == [[True, False, False, True, True], [True, False, False, False, False]]
    assert torch.isfinite(seen).all()
    assert torch.equal(layer(x, spoiled, mask=memory.mask), seen)


@pytest.mark.parametrize("sizes", [(1,), (3, 11, 0, 2), (97,)])
def test_pieces_of_a_series_give_the_tokens_of_the_whole(sizes: tuple[int, ...]) -> None:
    """Invariant 99."""
    series = with_gaps(53, 2)
    series[14:28] = math.nan
    encoder = SeriesEncoder(7, 2, normalization="running")
    whole, stream = encoder(series), mmattn.MemoryStream(encoder.dim)
    sources = []
    for memory in encoder.stream(piece.numpy() for piece in cut(series, sizes)):
        stream.append(memory)
        assert memory.sources is not None
        sources += memory.sources[0]
    assert whole.mask is not None and whole.sources is not None
    assert whole.mask[0].tolist() == [True] * 2 + [False] * 2 + [True] * 4
    assert torch.isfinite(whole.tokens).all()
    assert torch.equal(stream.memory().tokens[0], whole.tokens[0, whole.mask[0]])
    assert sources == [source for source, real in zip(whole.sources[0], whole.mask[0], strict=True) if real]


def test_it_has_a_fingerprint_a_dtype_and_no_weights() -> None:
    encoder = SeriesEncoder(4, 2)
    assert not encoder.state_dict() and not list(encoder.parameters())
    assert (
        encoder.fingerprint == SeriesEncoder(4, 2).fingerprint != SeriesEncoder(4, 2, position_features=4).fingerprint
    )
    assert encoder.to(torch.bfloat16)(torch.randn(1, 8, 2)).dtype == torch.bfloat16
    assert encoder([]).tokens.shape == (0, 0, encoder.dim)
    assert encoder(torch.randn(3, 8, 2)).tokens.shape == (3, 2, encoder.dim)
    assert SeriesEncoder(4, 2, position_features=0)(torch.randn(8, 2)).tokens.shape == (1, 2, 20)


#: What is asked, and what the message names.
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: SeriesEncoder(3, 2)([torch.zeros(4, 2), torch.zeros(4, 3)]), ShapeError, r"series 1 .*2\), got \(4, 3\)"),
    (lambda: SeriesEncoder(3, 2)([torch.zeros(4, 2), torch.zeros(4)]), ShapeError, r"series 1 .*2\), got \(4,\)"),
    (lambda: SeriesEncoder(3, 2)([torch.zeros(0, 2)]), ShapeError, "series 0 is empty"),
    (lambda: SeriesEncoder(3, 2)(3.5), ShapeError, "got float"),
    (lambda: SeriesEncoder(3, 2)([["a", "b"]]), ShapeError, "series 0"),
    (lambda: SeriesEncoder(3)(torch.tensor([0, 1, math.inf])), NonFiniteError, "series 0 .*time step 2"),
    (lambda: next(SeriesEncoder(3).stream([torch.zeros(3)])), ConfigError, "'running'"),
    (lambda: SeriesEncoder(3, position_features=3), ConfigError, "position_features must be even.*3"),
]


@pytest.mark.parametrize(("call", "error", "named"), REFUSED, ids=[named for _, _, named in REFUSED])
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        call()
