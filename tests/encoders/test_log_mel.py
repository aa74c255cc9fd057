"""LogMelEncoder: the features of Whisper and of HTK, rows that stand alone, streams, and what is no sound for it."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import WhisperFeatureExtractor

import mmattn
from mmattn.encoders import LogMelEncoder
from mmattn.errors import ConfigError
from tests.tiny_audio import chirp


@pytest.mark.parametrize("n_mels", [80, 128])
def test_features_are_those_of_whisper(n_mels: int) -> None:
    """Whisper centres its frames by reflection: given that, and its 30 seconds, every number is the same."""
    wave = chirp(3.1)
    theirs = WhisperFeatureExtractor(feature_size=n_mels)(wave.numpy(), sampling_rate=16000, return_tensors="pt")
    whole = torch.nn.functional.pad(wave, (0, 30 * 16000 - len(wave)))
    centred = torch.nn.functional.pad(whole[None], (200, 200), mode="reflect")[0]
    ear = LogMelEncoder(n_mels, 5)
    found = ear(centred).tokens[0].view(-1, n_mels)[:3000]
    assert torch.isfinite(found).all() and found.std() > 0.1
    found = found.maximum(found.max() - 8 / 4)  # its floor, 8 decades below the loudest band
    torch.testing.assert_close(found, theirs.input_features[0].T, atol=1e-4, rtol=0)


def test_a_row_is_the_same_alone_and_beside_others() -> None:
    ear = LogMelEncoder(23, 3)
    waves = [chirp(0.31), chirp(1.03), chirp(0.025), chirp(0.01)]
    memory = ear(waves)
    assert memory.lengths == [math.ceil(len(wave) / 480) for wave in waves]
    assert memory.sources is not None
    for number, wave in enumerate(waves):
        alone = ear.encode(wave)
        length = alone.length
        assert torch.isfinite(alone.tokens).all()
        assert torch.equal(memory.tokens[number, :length], alone.tokens[0])
        assert not memory.tokens[number, length:].any() and memory.sources[number][length:] == [None] * (35 - length)
    assert memory.sources[1][2] == {"audio": 1, "start": 0.06, "end": 0.09}


@pytest.mark.parametrize("sizes", [(16000,), (1, 7919, 40, 0, 3), (639, 641, 5003)])
def test_pieces_of_a_sound_give_the_tokens_of_the_whole(sizes: tuple[int, ...]) -> None:
    """Invariant 99."""
    ear, wave = LogMelEncoder(23, 4), chirp(1.777)
    pieces, start = [], 0
    while start < len(wave):
        for size in sizes:
            pieces.append(wave[start : start + size])
            start += size
    whole, stream = ear(wave), mmattn.MemoryStream(ear.dim)
    sources = []
    for memory in ear.stream(pieces):
        stream.append(memory)
        assert memory.sources is not None
        sources += memory.sources[0]
    assert torch.isfinite(whole.tokens).all()
    torch.testing.assert_close(stream.memory().tokens, whole.tokens, atol=1e-5, rtol=1e-5)
    assert sources == (whole.sources or [[]])[0]


def test_a_token_comes_as_soon_as_its_samples_are_there() -> None:
    given = []

    def microphone() -> object:
        for _ in range(20):
            given.append(160)
            yield torch.rand(160) - 0.5

    heard = [sum(given) for _ in LogMelEncoder(23, 4).stream(microphone())]
    # 640 samples of its own, and 240 that its last frame reaches over.
    assert heard == [960, 1600, 2240, 2880, 3200]


def test_it_has_a_fingerprint_a_dtype_and_no_weights() -> None:
    ear = LogMelEncoder(23, 4)
    assert not ear.state_dict() and not list(ear.parameters())
    assert ear.fingerprint == LogMelEncoder(23, 4).fingerprint != LogMelEncoder(23, 4, hop=0.008).fingerprint
    half = LogMelEncoder(23, 4).to(torch.bfloat16)
    wave = chirp(0.3)
    assert half.dtype == torch.bfloat16 == half(wave).dtype
    torch.testing.assert_close(half(wave).tokens.float(), ear(wave).tokens, atol=0.05, rtol=0.02)
    assert ear([]).tokens.shape == (0, 0, 92)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hop": 0.03}, "hop must be at most the window"),
        ({"hop": -0.01}, r"hop must be in \[0, inf\)"),
        ({"window": math.nan}, "window must be a finite number"),
        ({"n_mels": 200}, "200 bands are narrower than the 40 Hz between frequencies"),
        ({"frames_per_token": 0}, "frames_per_token must be at least 1"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LogMelEncoder(**options)  # type: ignore[arg-type]
