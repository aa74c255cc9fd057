"""load_audio, and sounds in pieces: every kind of file and array, other rates, and what is no sound, in words."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from mmattn.encoders import LogMelEncoder, audio, load_audio
from mmattn.errors import AudioError, ConfigError, MissingExtraError
from tests.tiny_audio import chirp


def written(samples: Any, rate: int = 16000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.asarray(samples), rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [("WAV", "FLOAT", 0), ("WAV", "PCM_16", 2**-15), ("FLAC", "PCM_24", 2**-23), ("OGG", "VORBIS", 0.1)],
)
def test_files_of_every_kind(kind: str, subtype: str, error: float, tmp_path: Path) -> None:
    wave, path = chirp(0.7), tmp_path / "sound"
    data = written(wave, 16000, kind, subtype)
    path.write_bytes(data)
    with open(path, "rb") as file:
        for source in (path, str(path), data, io.BytesIO(data), file):
            found = load_audio(source)
            assert found.dtype == torch.float32 and torch.isfinite(found).all()
            torch.testing.assert_close(found, wave, atol=error, rtol=0)


def test_channels_are_averaged_and_integers_scaled() -> None:
    wave = chirp(0.1)
    both = torch.stack([wave, -0.5 * wave])
    torch.testing.assert_close(load_audio(both), 0.25 * wave)
    torch.testing.assert_close(load_audio(written(both.T)), 0.25 * wave, atol=2**-15, rtol=0)
    for dtype, scale in ((torch.int16, 2**15), (torch.int32, 2**31), (torch.uint8, 2**7)):
        whole = ((wave * scale).round() + (128 if dtype == torch.uint8 else 0)).to(dtype)
        torch.testing.assert_close(load_audio(whole.numpy()), wave, atol=1 / scale, rtol=0)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates(rate: int) -> None:
    """A tone stays that tone, and what lies above half the new rate is gone."""
    times = torch.arange(rate) / rate
    tone, high = torch.sin(2 * math.pi * 440 * times), torch.sin(2 * math.pi * 9500 * times)
    wave = 0.4 * tone + (0.4 * high if rate > 19000 else 0)
    found = load_audio({"array": wave.numpy(), "sampling_rate": rate})
    assert abs(len(found) - 16000) <= 1
    wanted = 0.4 * torch.sin(2 * math.pi * 440 * torch.arange(len(found)) / 16000)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[400:-400], wanted[400:-400], atol=2e-3, rtol=0)
    assert torch.equal(found, load_audio((wave, rate)))


def test_a_long_file_comes_in_pieces_that_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 99."""
    data, ear = written(chirp(2.3, 22050), 22050, "FLAC"), LogMelEncoder(23, 4)
    whole = ear(data).tokens
    assert whole.isfinite().all() and whole.shape[1] > 50
    monkeypatch.setattr(audio, "_PIECE", 0.25)
    pieces = [memory.tokens for memory in ear.stream(data)]
    assert len(pieces) >= 9 and max(piece.shape[1] for piece in pieces) < 8
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=0)
    wave = chirp(1.1, 8000)
    parts = [memory.tokens for memory in ear.stream((wave.split(811), 8000))]
    torch.testing.assert_close(torch.cat(parts, 1), ear((wave, 8000)).tokens, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "kind", ["WAV PCM_16", "FLAC PCM_16", "OGG VORBIS", "OGG OPUS", "AIFF PCM_16", "MP3 MPEG_LAYER_III"]
)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_file_that_is_cut_short(kind: str, share: float, tmp_path: Path) -> None:
    """Invariant 102."""
    data = written(chirp(3.0), 16000, *kind.split())
    path = tmp_path / "torn"
    path.write_bytes(data)
    assert len(load_audio(path)) > 47000
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(AudioError, match=r"torn' .*cut short"):
        load_audio(path)


def test_a_file_of_which_the_writer_did_not_know_the_length() -> None:
    """As ffmpeg writes to a pipe: the largest length there is stands in the header."""
    wave = chirp(0.5)
    data = bytearray(written(wave, subtype="PCM_16"))
    at = data.index(b"data")
    data[4:8] = data[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    torch.testing.assert_close(load_audio(bytes(data)), wave, atol=2**-15, rtol=0)


LOUD = torch.sin(2 * math.pi * 200 * torch.arange(4000) / 16000)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", r"the bytes is empty \(0 bytes\)"),
        (b"<html>not here</html>", "the bytes cannot be read as a sound"),
        ("nowhere.wav", "there is no file 'nowhere.wav'"),
        ("/", "'/' is a folder"),
        ("https://example.org/a.wav", "is an address, and nothing is downloaded"),
        (torch.zeros(0), r"the tensor \(0,\) has no samples"),
        (np.array(["a", "b"]), r"the array \(2,\) is <U1; give floats"),
        ({"array": np.zeros(400), "sampling_rate": "fast"}, "an int 'sampling_rate'"),
        (np.zeros((2, 3, 4)), r"the array \(2, 3, 4\) is not one sound"),
        (torch.zeros(16000, 2), "more channels than samples"),
        (torch.zeros(5, dtype=torch.bool), "is torch.bool; give floats"),
        (torch.tensor([0.0, math.nan, 0.1]), "has NaN or infinity, 0.00 s and 1 samples from its beginning"),
        (1000 * LOUD, "has samples up to 1000, and full scale is 1"),
        (written(torch.zeros(0)), "the bytes has no samples"),
        (3.5, "a sound was expected, got float; give a path"),
        ({"array": [0.0]}, "a sound is a dict of 'array' and an int 'sampling_rate'"),
        (io.StringIO("text"), "reads as text; open it with mode 'rb'"),
    ],
)
def test_what_is_no_sound_is_said(source: Any, words: str) -> None:
    """Invariant 102."""
    with pytest.raises(AudioError, match=words):
        load_audio(source)
    with pytest.raises(AudioError, match=f"sound 1: .*{words}"):
        LogMelEncoder()([torch.zeros(400), source])


def test_what_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limit, pytest.raises(AudioError, match="is longer than 0.2 seconds; cut it"):
        limit.setattr(audio, "MAX_SECONDS", 0.2)
        load_audio(LOUD * 0.5)
    for source, rate in ((LOUD, 0), ((LOUD, 0), 16000), ({"array": LOUD, "sampling_rate": 0}, 16000)):
        with pytest.raises(ConfigError, match="rate must be at least 1, got 0"):
            load_audio(source, rate)
    with pytest.raises(AudioError, match="a piece of a sound was expected, got str"):
        list(LogMelEncoder().stream(["one", "two"]))
    with pytest.raises(AudioError, match="one sound or several were expected, got int"):
        LogMelEncoder()(7)
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"mmattn\[audio\]"):
        load_audio(b"RIFF")
