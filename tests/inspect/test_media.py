"""Traces over sounds, series and videos: where each source lies, the pictures under them, and what does not fit."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import mmattn
import mmattn.inspect.media
import mmattn.inspect.record_attention
from mmattn import inspect
from mmattn.encoders import Frame, LogMelEncoder, SeriesEncoder
from mmattn.errors import ConfigError, NonFiniteError, ShapeError
from mmattn.inspect.trace import SIDE
from tests.inspect.test_trace import made
from tests.tiny_audio import chirp

WORDS = ("a", "b")


def traced(names: list[str], weights: Tensor | None = None, **more: Any) -> mmattn.inspect.Trace:
    shares = torch.rand(1, 2, 2, len(names)).softmax(-1) if weights is None else weights
    return inspect.Trace(WORDS, names, shares, ["layer 1"], "a title", **more)


def dark(picture: bytes) -> Tensor:
    grey = Image.open(io.BytesIO(picture)).convert("L")
    return 255 - torch.from_numpy(np.asarray(grey, dtype=np.float32).copy())


@pytest.mark.parametrize("kind", ["spectrogram", "waveform"])
def test_a_sound_lies_under_its_weights(kind: str) -> None:
    """A tone in the third quarter is dark there, and in the spectrogram nowhere but there."""
    wave = torch.zeros(32000)
    wave[16000:24000] = 0.5 * torch.sin(2 * math.pi * 600 * torch.arange(8000) / 16000)
    memory = LogMelEncoder(23, 10)(wave)
    names = inspect.media_names(memory)
    assert names[:2] == ["0.00–0.10 s", "0.10–0.20 s"] and len(names) == 20
    trace = inspect.over_sound(traced(names), memory, wave, kind=kind)  # type: ignore[arg-type]
    assert trace.extent == 2.0 and trace.spans is not None and trace.spans[3] == (0.3, 0.4, 0.0, 1.0)
    page = dark(trace.picture)
    assert page.shape == (SIDE // 2, 4 * SIDE)
    quarters = [float(part.mean()) for part in page.split(SIDE, 1)]
    assert quarters[2] > 3 * max(quarters[0], quarters[1], quarters[3])
    if kind == "spectrogram":
        low, high = page[:, 2 * SIDE + 9 : 3 * SIDE - 9].split(SIDE // 4, 0)[::-1]
        assert float(low.mean()) > 2 * float(high.mean()), "a tone of 600 Hz is at the bottom"


def test_stretches_are_one_source() -> None:
    memory = LogMelEncoder(23, 4)([chirp(1.0), chirp(0.3)])
    names = inspect.media_names(memory, 0.25)
    assert list(dict.fromkeys(names)) == ["0.00–0.25 s", "0.25–0.50 s", "0.50–0.75 s", "0.75–1.00 s"]
    assert [names.count(name) for name in dict.fromkeys(names)] == [7, 6, 6, 6]
    short = inspect.media_names(memory, row=1)
    assert short[7] == "0.28–0.32 s" and short[8:] == [None] * 17
    trace = inspect.over_sound(traced(sorted({str(name) for name in names})), memory, chirp(1.0), every=0.25)
    assert trace.spans is not None and trace.spans[1] == (0.25, 0.5, 0.0, 1.0)


def test_bands_lie_one_above_the_other() -> None:
    sources = [[{"audio": 0, "start": 0.0, "end": 0.5, "band": band} for band in range(4)]]
    memory = mmattn.Memory(torch.zeros(1, 4, 3), sources=sources)
    names = inspect.media_names(memory)
    trace = inspect.over_sound(traced(names), memory, chirp(0.5))  # type: ignore[arg-type]
    assert trace.spans == tuple((0.0, 0.5, band / 4, (band + 1) / 4) for band in range(4))
    assert names[1] == "0.00–0.50 s, band 2"


def test_a_series_lies_under_its_weights() -> None:
    series = torch.stack([torch.arange(90.0), -torch.arange(90.0)], 1)
    series[40:50] = math.nan
    memory = SeriesEncoder(10, 2)(series)
    names = [name for name, real in zip(inspect.media_names(memory), memory.real_slots()[0], strict=True) if real]
    trace = inspect.over_series(traced(names), memory, series)  # type: ignore[arg-type]
    assert trace.extent == 90.0 and trace.unit == "" and trace.spans is not None
    assert names[4] == "50–60" and trace.spans[4] == (50.0, 60.0, 0.0, 1.0)
    page = dark(trace.picture)
    gap = page[:, int(1024 * 0.46) : int(1024 * 0.54)]
    assert float(gap.mean()) < 0.2 * float(page.mean()), "nothing where nothing was observed"
    # The first channel rises from the left to the right, and the second one falls.
    first, second = page[:64, :200].sum(1), page[64:, :200].sum(1)
    assert first[32:].sum() > 5 * first[:32].sum() and second[:32].sum() > 5 * second[32:].sum()


def film(count: int = 3, pooled: bool = False) -> tuple[mmattn.Memory, list[Frame]]:
    """Frames of 2 × 3 patches at half seconds, each of one grey."""
    frames = [Frame(n / 2, np.full((40, 60, 3), 60 + 60 * n, np.uint8)) for n in range(count)]
    places = [{}] if pooled else [{"patch": [r, c]} for r in range(2) for c in range(3)]
    sources = [{"video": 0, "frame": n, "time": n / 2, **place} for n in range(count) for place in places]
    return mmattn.Memory(torch.zeros(1, len(sources), 3), sources=[sources]), frames


def test_frames_are_a_strip() -> None:
    memory, frames = film()
    names = inspect.media_names(memory)
    assert names[8] == "0.50 s, row 1, column 3"
    weights = torch.arange(18.0).expand(1, 1, 2, 18) / 200
    trace = inspect.over_frames(traced(names, weights, dropped=weights[0, 0]), memory, frames)  # type: ignore[arg-type]
    assert trace.grid == (2, 9) and trace.sources[5] == "0.50 s, row 1, column 3"
    grid = (trace.weights[0, 0, 0] * 200).view(2, 3, 3).round()
    # Of each frame its own six, in the place where they lie in it.
    assert grid.transpose(0, 1).flatten().tolist() == list(range(18))
    assert torch.equal(trace.dropped, trace.weights[0, 0])
    page = 255 - dark(trace.picture)
    assert page.shape == (128, 3 * 192)
    assert [round(float(part.mean())) for part in page.split(192, 1)] == pytest.approx([60, 120, 180], abs=2)
    memory, frames = film(4, pooled=True)
    trace = inspect.over_frames(traced(inspect.media_names(memory)[::-1]), memory, frames)  # type: ignore[arg-type]
    assert trace.grid == (1, 4) and trace.sources == ("0.00 s", "0.50 s", "1.00 s", "1.50 s")


def test_files_and_plots_of_them(tmp_path: Path) -> None:
    memory, wave = LogMelEncoder(23, 10)(chirp(1.0)), chirp(1.0)
    sound = inspect.over_sound(traced(inspect.media_names(memory)), memory, wave)  # type: ignore[arg-type]
    video = inspect.over_frames(traced(inspect.media_names(film()[0])), *film())  # type: ignore[arg-type]
    inspect.save_traces([sound, video, made()], tmp_path)
    loaded = inspect.load_traces(tmp_path)
    assert [one.spans for one in loaded] == [sound.spans, None, None]
    assert (loaded[0].extent, loaded[0].unit, loaded[1].grid) == (1.0, "s", (2, 9))
    for number, trace in enumerate(loaded):
        path = inspect.plot_heat_maps(trace, tmp_path / f"{number}.png")
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(1 << 24)) > 100
            assert (image.height > 250) == (number < 2)
    bare = inspect.plot_heat_maps(traced(["x", "y"], spans=[(0, 1), (1, 3)]), tmp_path / "bare.png")
    assert bare.stat().st_size > 1000


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"spans": [(0, 1)]}, ShapeError, "one for each of 2 sources, got 1"),
        ({"spans": [(0, 1), (0, 1, 2)]}, ShapeError, "one for each of 2 sources"),
        ({"spans": [(0, 1), (2, 1)]}, ConfigError, "0 ≤ start ≤ end"),
        ({"spans": [(0, 1), (1, 2)], "extent": 0}, ConfigError, "extent must be above 0"),
        ({"spans": [(0, 1), (1, math.nan)]}, NonFiniteError, "spans of a trace"),
        ({"spans": [(0, 1), (1, 2)], "grid": (1, 2)}, ConfigError, "both were given"),
    ],
)
def test_spans_that_do_not_fit(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        traced(["x", "y"], **changes)


def test_what_is_of_another_memory() -> None:
    memory = LogMelEncoder(23, 10)(chirp(1.0))
    with pytest.raises(ConfigError, match="'slot 3' is no slot of this memory: name the sources"):
        inspect.over_sound(traced(["slot 3"]), memory, chirp(1.0))
    with pytest.raises(ConfigError, match="no sources that say when its slots are"):
        inspect.media_names(mmattn.Memory(torch.zeros(1, 2, 3)))
    with pytest.raises(ConfigError, match="kind must be one of"):
        inspect.over_sound(traced(["x"]), memory, chirp(1.0), kind="cepstrum")
    memory, frames = film()
    names = [str(name) for name in inspect.media_names(memory)]
    with pytest.raises(ConfigError, match=r"a frame at 1 s, and frames has none"):
        inspect.over_frames(traced(names), memory, frames[:2])
    with pytest.raises(ConfigError, match="a strip of 3 frames has 18 patches, and the trace names 17 sources"):
        inspect.over_frames(traced(names[1:]), memory, frames)
    with pytest.raises(ShapeError, match=r"a series is \(length, channels\)"):
        inspect.over_series(traced(["x"]), memory, torch.zeros(2, 3, 4))
