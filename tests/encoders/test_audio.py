"""AudioEncoder: each family as transformers runs it, rows that stand alone, windows, streams, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmattn
from mmattn.encoders import AudioEncoder
from mmattn.errors import AdapterFileError, AudioError, ConfigError
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


def test_a_row_is_the_same_alone_and_beside_others(encoder: AudioEncoder) -> None:
    """Invariant 101."""
    waves = [chirp(0.31), chirp(1.7), chirp(0.31) * 0.5, chirp(0.1)]
    numbers = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    memory = encoder(waves)
    assert (np.random.get_state()[1] == numbers).all()  # type: ignore[union-attr]
    assert memory.sources is not None and memory.mask is not None
    for number, wave in enumerate(waves):
        alone = encoder.encode(wave)
        assert memory.lengths[number] == alone.length > 0
        torch.testing.assert_close(memory.tokens[number, : alone.length], alone.tokens[0], atol=1e-5, rtol=1e-5)
        assert alone.sources is not None
        assert memory.sources[number] == [{**source, "audio": number} for source in alone.sources[0]] + [None] * (
            memory.length - alone.length
        )
    pooled = AudioEncoder(encoder.model, encoder.feature_extractor, pooled=True)(waves)
    assert pooled.sources == [[{"audio": number}] for number in range(4)]
    torch.testing.assert_close(pooled.tokens[3, 0], encoder(waves[3]).tokens[0].mean(0))


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


def test_pieces_give_the_tokens_of_the_whole(encoder: AudioEncoder) -> None:
    """Invariant 99."""
    ear = AudioEncoder(encoder.model, encoder.feature_extractor, window=0.4)
    for seconds in (1.57, 0.8, 0.2):
        wave, stream, sources = chirp(seconds), mmattn.MemoryStream(ear.dim), []
        for memory in ear.stream(wave.split(1009)):
            stream.append(memory)
            assert memory.sources is not None
            sources += memory.sources[0]
        whole = ear(wave)
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


def test_what_cannot_be() -> None:
    model, extractor = tiny_audio("wav2vec2")
    ear = AudioEncoder(model, extractor)
    with pytest.raises(AudioError, match=r"sound 1: 40 samples at 16000 Hz are too short for one state of Wav2Vec2"):
        ear([torch.zeros(4000), torch.zeros(40)])
    with pytest.raises(ConfigError, match="Wav2Vec2Model is a model: give its feature_extractor"):
        AudioEncoder(model)
    with pytest.raises(ConfigError, match="reads 1 s at once, and window is 2"):
        AudioEncoder(*tiny_audio("whisper"), window=2)
    with pytest.raises(ConfigError, match="Linear is no model of transformers"):
        AudioEncoder(torch.nn.Linear(3, 3), extractor)
    with pytest.raises(ConfigError, match="build the encoder without pooled"):
        next(AudioEncoder(model, extractor, pooled=True).stream([torch.zeros(999)]))
    with pytest.raises(AdapterFileError, match="no feature extractor can be loaded from"):
        AudioEncoder("/nowhere/at/all")


def test_a_text_model_is_no_audio_encoder() -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(ConfigError, match="BertModel does not turn sounds alone into states of their times"):
        AudioEncoder(model, tiny_audio("wav2vec2")[1])
