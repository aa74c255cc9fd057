"""Names of slots by the times of their sources."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn import inspect
from mmattn.encoders import LogMelEncoder, SeriesEncoder
from mmattn.errors import ConfigError
from tests.tiny_audio import chirp


def test_stretches_are_one_source() -> None:
    memory = LogMelEncoder(23, 4)([chirp(1.0), chirp(0.3)])
    names = inspect.media_names(memory, 0.25)
    assert list(dict.fromkeys(names)) == ["0.00–0.25 s", "0.25–0.50 s", "0.50–0.75 s", "0.75–1.00 s"]
    assert [names.count(name) for name in dict.fromkeys(names)] == [7, 6, 6, 6]
    short = inspect.media_names(memory, row=1)
    assert short[7] == "0.28–0.32 s" and short[8:] == [None] * 17


def test_names_of_series_bands_and_patches() -> None:
    assert inspect.media_names(SeriesEncoder(10, 2)(torch.randn(90, 2)))[4] == "40–50"
    sources = [[
        {"audio": 0, "start": 0.0, "end": 0.5, "band": 1},
        {"video": 0, "frame": 1, "time": 0.5, "patch": [0, 2]},
        {"video": 0, "frame": 2, "time": 1.0},
    ]]  # fmt: skip
    names = inspect.media_names(mmattn.Memory(torch.zeros(1, 3, 3), sources=sources))
    assert names == ["0.00–0.50 s, band 2", "0.50 s, row 1, column 3", "1.00 s"]
    with pytest.raises(ConfigError, match="no sources that say when its slots are"):
        inspect.media_names(mmattn.Memory(torch.zeros(1, 2, 3)))
