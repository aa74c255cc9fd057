"""AudioEncoder and LogMelEncoder: as transformers computes them, rows that stand alone, streams, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, WhisperFeatureExtractor

import mmattn
from mmattn.encoders import AudioEncoder, LogMelEncoder
from mmattn.errors import AdapterFileError, AudioError, ConfigError
from tests.encoders.pieces import cut
from tests.tiny_audio import FAMILIES, RATE, WIDTH, chirp, tiny_audio


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def parts(family: str) -> tuple[Any, Any]:
    torch.manual_seed(7)
    return tiny_audio(family)


@pytest.fixture(scope="module")
def encoder(parts: tuple[Any, Any]) -> AudioEncoder:
    return AudioEncoder(*parts)


def by_transformers(family: str, model: Any, extractor: Any, wave: Tensor) -> Tensor:
    """The states (m, e) of one sound by transformers itself, all of them, in the order of time."""
    inputs = extractor(wave.numpy(), sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        if family == "whisper":
            return model.get_encoder()(inputs["input_features"]).last_hidden_state[0]
        if family.startswith("clap"):
            part = model.audio_model.eval()
            found = part(inputs["input_features"].float(), is_longer=torch.tensor([[False]])).last_hidden_state[0]
            return torch.stack([found[:, band, time] for time in range(32) for band in range(2)])
        return model.eval()(inputs["input_values"]).last_hidden_state[0]


@pytest.mark.parametrize("seconds", [1.0, 0.31])
def test_states_are_those_of_transformers(
    family: str, parts: tuple[Any, Any], encoder: AudioEncoder, seconds: float
) -> None:
    wave = chirp(seconds)
    memory = encoder(wave)
    wanted = by_transformers(family, *parts, wave)
    assert encoder.dim == memory.dim == WIDTH
    assert torch.isfinite(memory.tokens).all() and float(memory.tokens.std()) > 1e-3
    length = memory.length
    torch.testing.assert_close(memory.tokens[0], wanted[:length], atol=1e-5, rtol=1e-5)
    if family in ("whisper", "clap", "clap-fused"):
        assert (length == len(wanted)) == (seconds == 1.0), "only the padding is left out"
    else:
        assert length == len(wanted)


@pytest.mark.parametrize("name", [*FAMILIES, "log mel"])
def test_a_row_is_the_same_alone_and_beside_others(name: str) -> None:
    """Invariant 101."""
    torch.manual_seed(7)
    ear: Any = LogMelEncoder(23, 3) if name == "log mel" else AudioEncoder(*tiny_audio(name))
    waves = [chirp(0.31), chirp(1.7), chirp(0.31) * 0.5, chirp(0.1)]
    numbers = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    memory = ear(waves)
    assert (np.random.get_state()[1] == numbers).all()  # type: ignore[union-attr]
    assert memory.sources is not None and memory.mask is not None
    for number, wave in enumerate(waves):
        alone = ear.encode(wave)
        assert torch.isfinite(alone.tokens).all() and memory.lengths[number] == alone.length > 0
        torch.testing.assert_close(memory.tokens[number, : alone.length], alone.tokens[0], atol=1e-5, rtol=1e-5)
        assert alone.sources is not None
        assert memory.sources[number] == [{**source, "audio": number} for source in alone.sources[0]] + [None] * (
            memory.length - alone.length
        )


def test_times_of_a_long_sound_follow_each_other(encoder: AudioEncoder) -> None:
    long = AudioEncoder(encoder.model, encoder.feature_extractor, window=0.4)
    memory = long(chirp(1.57))
    assert memory.sources is not None
    starts = list(dict.fromkeys(source["start"] for source in memory.sources[0]))
    step = memory.sources[0][0]["end"] - memory.sources[0][0]["start"]
    apart = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    # Windows do not begin at whole multiples of a step: at their seams a step is shorter or longer by half.
    assert min(apart) > 0.25 * step and max(apart) < 2.1 * step
    assert sum(apart) / len(apart) == pytest.approx(step, rel=0.1)
    assert starts[0] == 0 and abs(1.57 - memory.sources[0][-1]["end"]) < 2 * step + 0.01


def test_an_array_with_its_rate() -> None:
    """As soundfile and torchaudio read a file, alone and in a list."""
    ear, wave = LogMelEncoder(23, 4), chirp(0.8)
    want = ear({"array": wave, "sampling_rate": 22050}).tokens
    assert torch.isfinite(want).all() and ear(wave).tokens.shape != want.shape
    for sound in ((wave, 22050), [(wave.numpy(), 22050)]):
        assert torch.equal(ear(sound).tokens, want)


@pytest.mark.parametrize("sizes", [(1009,), (1, 7919, 40, 0, 3)])
@pytest.mark.parametrize("name", [*FAMILIES, "log mel"])
def test_pieces_give_the_tokens_of_the_whole(name: str, sizes: tuple[int, ...]) -> None:
    """Invariant 99."""
    torch.manual_seed(7)
    ear: Any = LogMelEncoder(23, 4) if name == "log mel" else AudioEncoder(*tiny_audio(name), window=0.4)
    for seconds in (1.57, 0.8, 0.2):
        wave, stream, sources = chirp(seconds), mmattn.MemoryStream(ear.dim), []
        for memory in ear.stream(cut(wave, sizes)):
            stream.append(memory)
            assert memory.sources is not None
            sources += memory.sources[0]
        whole = ear(wave)
        assert torch.isfinite(whole.tokens).all()
        torch.testing.assert_close(stream.memory().tokens, whole.tokens, atol=1e-5, rtol=1e-5)
        assert [sources] == whole.sources


@pytest.mark.parametrize("name", ["whisper", "hubert", "clap"])
def test_a_folder_a_fingerprint_and_a_dtype(name: str, tmp_path: Path) -> None:
    model, extractor = tiny_audio(name)
    for part in (model, extractor):
        part.save_pretrained(tmp_path)
    given, loaded, wave = AudioEncoder(model, extractor), AudioEncoder(tmp_path), chirp(0.3)
    assert loaded.fingerprint == given.fingerprint != AudioEncoder(tmp_path, window=0.1).fingerprint
    assert torch.isfinite(given(wave).tokens).all()
    assert torch.equal(loaded(wave).tokens, given(wave).tokens)
    assert loaded([]).tokens.shape == (0, 0, WIDTH)
    assert loaded.to(torch.bfloat16)(wave).dtype == torch.bfloat16


def test_a_head_is_left_out() -> None:
    """Of a model that recognises speech its states are used."""
    from transformers import HubertForCTC

    bare, extractor = tiny_audio("hubert")
    whole = HubertForCTC(bare.config)
    whole.hubert.load_state_dict(bare.state_dict())
    given, wanted = AudioEncoder(whole, extractor), AudioEncoder(bare, extractor)
    assert given.fingerprint == wanted.fingerprint
    wave = chirp(0.3)
    assert torch.equal(given(wave).tokens, wanted(wave).tokens)


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


def bert() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertModel(BertConfig(vocab_size=31, **sizes))


#: What is asked, and what the message names.
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: wav2vec2()([torch.zeros(4000), torch.zeros(40)]), AudioError, "sound 1: 40 samples at 16000 Hz.*Wav2Vec2"),
    (lambda: AudioEncoder(wav2vec2().model), ConfigError, "Wav2Vec2Model is a model"),
    (lambda: AudioEncoder(*tiny_audio("whisper"), window=2), ConfigError, "1 s at once, and window is 2"),
    (lambda: AudioEncoder(nn.Linear(3, 3), wav2vec2().feature_extractor), ConfigError, "Linear"),
    (lambda: AudioEncoder(bert(), wav2vec2().feature_extractor), ConfigError, "BertModel"),
    (lambda: AudioEncoder("/nowhere/at/all"), AdapterFileError, "no feature extractor can be loaded from"),
    (lambda: LogMelEncoder(hop=0.03), ConfigError, "window of 0.025"),
    (lambda: LogMelEncoder(hop=-0.01), ConfigError, "hop must be in"),
    (lambda: LogMelEncoder(window=math.nan), ConfigError, "window must be a finite number"),
    (lambda: LogMelEncoder(n_mels=200), ConfigError, "200 bands are narrower than the 40 Hz"),
    (lambda: LogMelEncoder(frames_per_token=0), ConfigError, "frames_per_token must be at least 1"),
]


def wav2vec2(**options: Any) -> AudioEncoder:
    return AudioEncoder(*tiny_audio("wav2vec2"), **options)


@pytest.mark.parametrize(("call", "error", "named"), REFUSED, ids=[named for _, _, named in REFUSED])
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        call()
