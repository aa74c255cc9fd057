"""The listening recipe: noise has its loudness, the sensor none of it, series match their descriptions; controls."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import mmattn
from mmattn.encoders import LogMelEncoder
from mmattn.errors import ConfigError
from tests.recipes.runs import SENSOR, SMALL, STEPS, standing_in

RECIPE = "listen"


@pytest.fixture
def toneful(recipe: SimpleNamespace) -> Iterator[None]:
    """No espeak-ng for this test."""
    with standing_in():
        yield


@pytest.fixture
def speech(recipe: SimpleNamespace, toneful: None, tmp_path: Path) -> Any:
    """Three speakers in noise."""
    settings = recipe.settings.VoiceSettings(speakers=3, held_out=1, chatter=2, cache=str(tmp_path))
    spoken = recipe.voices.speak(settings, False)
    bands = LogMelEncoder(16, frames_per_token=1, sampling_rate=8000, window=0.032, hop=0.02)
    ear = partial(recipe.data.log_energies, bands)
    sensor = LogMelEncoder(3, frames_per_token=1, sampling_rate=8000, window=0.04, hop=0.04)
    noise = recipe.settings.NoiseSettings()
    return recipe.data.Speech(spoken["train"], spoken["chatter"], settings, noise, ear, sensor)


def test_no_held_out_voice_is_trained_on(recipe: SimpleNamespace, toneful: None, tmp_path: Path) -> None:
    voices = recipe.voices
    assert len(set(voices.HELD_OUT)) == 8
    assert not {voice.split("+")[1] for voice in voices.HELD_OUT} & set(voices.VARIANTS)
    spoken = voices.speak(recipe.settings.VoiceSettings(speakers=5, chatter=3, cache=str(tmp_path)), False)
    assert {speaker.voice for speaker in spoken["held_out"].speakers} == set(voices.HELD_OUT)
    others = [speaker.voice for name in ("train", "chatter") for speaker in spoken[name].speakers]
    assert len(others) == 8 and not set(others) & set(voices.HELD_OUT)


@pytest.mark.parametrize("snr", [-7.0, 0.0, 5.0])
def test_noise_is_as_loud_as_it_says(recipe: SimpleNamespace, speech: Any, snr: float) -> None:
    one = recipe.data.Utterance(1, (3, 17, 3))
    mixed, alone, places = speech.mix(one, snr, np.random.default_rng(7))
    assert len(places) == 3 and np.isfinite(mixed).all() and np.abs(mixed).max() <= 0.5
    # The mix is a share of the voice alone, and uncorrelated noise.
    spoken = np.concatenate([alone[start:stop] for start, stop in places])
    share = float(mixed @ alone / (alone @ alone))
    noise = mixed - share * alone
    measured = 10 * math.log10(share**2 * float(np.mean(spoken**2)) / float(np.mean(noise**2)))
    assert measured == pytest.approx(snr, abs=0.5)
    for (_, stop), (start, _) in zip(places, places[1:], strict=False):
        assert stop <= start


def test_places_say_which_word_is_spoken(recipe: SimpleNamespace, speech: Any) -> None:
    one = recipe.data.Utterance(0, (5, 11))
    clips = speech.batch([one], [30.0], [3])
    assert clips.energies.shape == (1, 16, 125) and clips.spoken.shape == (1, 63) and clips.sensed.shape == (1, 63, 3)
    words = [word for word in clips.spoken[0].tolist() if word != recipe.data.START]
    assert words == sorted(words) and set(words) == {5, 11} and len(words) == pytest.approx(10, abs=2)
    # Where a word is spoken it is louder than around it.
    speaking = clips.spoken[0] != recipe.data.START
    assert clips.sensed[0].mean(1)[speaking].mean() > clips.sensed[0].mean(1)[~speaking].mean() + 0.3


def test_the_sensor_feels_the_voice_and_not_the_noise(recipe: SimpleNamespace, speech: Any) -> None:
    one = recipe.data.Utterance(2, (1, 2, 3))
    loud, faint = (speech.batch([one], [snr], [5]) for snr in (-20.0, 20.0))
    assert torch.equal(loud.sensed, faint.sensed) and loud.sensed.isfinite().all()
    assert not torch.allclose(loud.energies, faint.energies, atol=0.1)


def test_a_stream_can_be_told_from_that_of_another_utterance(recipe: SimpleNamespace, speech: Any) -> None:
    settings = recipe.settings.RecogniserSettings(width=12, heads=2, bands=16, adapter=SMALL)
    recogniser = recipe.recogniser.Recogniser(settings, 125).eval()
    random = Random(3)
    clips = speech.batch([speech.draw(random) for _ in range(9)], [10.0] * 9, range(9))
    # An ear and a sensor that know what is said.
    sure = torch.nn.functional.one_hot(clips.spoken, recipe.data.VOCABULARY) * 9.0
    recogniser.ear.forward = lambda energies: (None, sure)
    _, own = recogniser.agree(sure, clips.energies)
    _, others = recogniser.agree(sure.roll(1, 0), clips.energies)
    assert own.min() > 1.8 and others.min() >= -1 and others.max() < 1.2
    mixed = torch.cat([sure[:4], sure[4:].roll(1, 0)])
    memory = recogniser.sense(mixed, clips.energies, least=1.5)
    assert memory.tokens.shape == (9, 63, 2 * 12 + 2) and memory.tokens.isfinite().all()
    assert memory.mask is not None and memory.mask.all(1).tolist() == [True] * 4 + [False] * 5
    assert not memory.mask[4:].any()
    vectors = recogniser.model.host.get_input_embeddings().weight
    assert torch.allclose(memory.tokens[:4, :, :12], (vectors / vectors.std())[clips.spoken[:4]], atol=0.2)


@pytest.mark.slow
def test_the_saved_recogniser_loads_with_both_memories(recipe: SimpleNamespace, run: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    ear = load_file(run / "recogniser" / "ear.safetensors")
    assert ear["places"].shape == (63, 16)
    host = AutoModelForCausalLM.from_pretrained(run / "recogniser")
    model = mmattn.load(host, run / "recogniser" / "audio", "audio")
    model = mmattn.load(model, run / "adapter", "sensor")
    memory = {"audio": mmattn.Memory(torch.randn(3, 63, 16)), "sensor": mmattn.Memory(torch.randn(3, 63, 2 * 16 + 2))}
    with torch.no_grad():
        logits = model(torch.full((3, 1), recipe.data.START), memory=memory).logits
    assert logits.shape == (3, 1, recipe.data.VOCABULARY) and logits.isfinite().all()


def save_tiny_whisper(recipe: SimpleNamespace, folder: Path) -> Path:
    """A Whisper with random weights, whose tokens are the words of the recipe and the prompt."""
    words = [f"Ġ{word}" for word in recipe.voices.WORDS]
    tokens = {name: token for token, name in enumerate(["!", *words, "<|endoftext|>", *recipe.whisper.PROMPT])}
    end, start, english, transcribe, plain = range(len(words) + 1, len(tokens))
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.WhisperConfig(
        vocab_size=len(tokens), d_model=26, encoder_ffn_dim=17, decoder_ffn_dim=19, num_mel_bins=11,
        max_source_positions=1500, max_target_positions=23, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=start, **sizes,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, no_timestamps_token_id=plain,
        lang_to_id={"<|en|>": english}, task_to_id={"transcribe": transcribe}, is_multilingual=True,
        max_length=23,
    )  # fmt: skip
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(11).save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.BPE(tokens, [])).save(str(folder / "tokenizer.json"))
    transformers.WhisperTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_run_with_whisper_has_its_controls(recipe: SimpleNamespace, toneful: None, tmp_path: Path) -> None:
    run = recipe.train.main(
        {
            "out": str(tmp_path / "run"),
            "progress": False,
            "whisper": {"name": str(save_tiny_whisper(recipe, tmp_path / "whisper")), "clips": 7},
            "voices": {"speakers": 2, "held_out": 1, "chatter": 2, "sampling_rate": 16000, "cache": str(tmp_path)},
            "sensor": {
                "held_out": 11,
                "optim": STEPS,
                "adapter": {**SMALL, "layers": [1], "every": None},
                "encoder": {**STEPS, "width": 8},
            },
        }
    )
    rows = {row["name"]: row for row in json.loads((run / "table.json").read_text())["rows"]}
    assert tuple(rows) == SENSOR and "parameters" not in rows["audio only"]
    assert all(math.isfinite(row["noisy"]) for row in rows.values())
    blind = rows["audio, the adapter without a sensor"]
    assert blind == {**rows["audio only"], "name": blind["name"]}
    assert (run / "adapter").is_dir() and not (run / "recogniser").exists()


def test_whisper_writes_words_of_the_list(recipe: SimpleNamespace, tmp_path: Path) -> None:
    folder = save_tiny_whisper(recipe, tmp_path)
    with pytest.raises(ValueError, match="sampling_rate=16000"):
        recipe.settings.Config(whisper={})
    config = recipe.settings.Config(whisper={"name": str(folder)}, voices={"sampling_rate": 16000})
    whisper = recipe.whisper.WhisperRecogniser(config)
    states = whisper.listen([torch.randn(40_000), torch.randn(40_000)])
    assert states.shape == (2, 150, 26)
    rows = whisper.transcribe(states, 5)
    assert all(len(row) <= 5 and set(row) <= set(range(len(recipe.voices.WORDS))) for row in rows)
    # Teacher forcing gives the words that were generated.
    row = rows[0]
    logits = whisper.logits(torch.tensor([[recipe.data.START, *row]]), states[:1])
    assert logits.shape == (1, 1 + len(row), recipe.data.END + 1) and logits.argmax(-1)[0, : len(row)].tolist() == row
    # Words in turn, and nothing else of a slot, tell the words that are felt.
    felt = torch.tensor([[30, 4, 4, 30, 4, 7, 7, 30]])
    memory = whisper.sense(torch.nn.functional.one_hot(felt, recipe.data.VOCABULARY) * 99.0, states[:1])
    most = recipe.settings.VoiceSettings().most
    assert memory.tokens.shape == (1, 8, whisper.dim)
    assert memory.tokens[0, :, :31].argmax(-1).tolist() == felt[0].tolist()
    assert memory.tokens[0, :, 31 : 32 + most].argmax(-1).tolist() == [0, 1, 1, 1, 2, 3, 3, 3]


def test_without_espeak_it_says_what_to_install(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="apt-get install espeak-ng.*config_series.yaml"):
        recipe.voices.find_espeak()


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_espeak_speaks_with_its_voices(recipe: SimpleNamespace) -> None:
    voices = recipe.voices
    voices.check_voices({*voices.HELD_OUT, *(f"en-us+{variant}" for variant in voices.VARIANTS)})
    with pytest.raises(ConfigError, match=r"en-us\+nobody"):
        voices.check_voices({"en-us+nobody", "en-gb+f2"})
    one, other = (voices.say("seventy", voices.Speaker(voice, 240, 50), 8000) for voice in voices.HELD_OUT[:2])
    assert 0.2 < len(one) / 8000 < 1 and float(np.abs(one).max()) == pytest.approx(1)
    assert len(one) != len(other) or not np.allclose(one, other)


def test_resampling_keeps_a_tone(recipe: SimpleNamespace) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(22050) / 22050).astype(np.float32)
    found = recipe.voices.resample(tone, 22050, 8000)
    assert len(found) == 8000 and np.abs(np.fft.rfft(found)).argmax() == 440
    assert float(np.abs(found).max()) == pytest.approx(1, abs=0.01)


# Series --------------------------------------------------------------------------------------------------------------


def test_series_are_as_described(recipe: SimpleNamespace) -> None:
    series, settings = recipe.series, recipe.settings.SeriesSettings()
    for seed in range(60):
        told = series.Description.draw(Random(seed))
        values = series.make_series(told, settings, seed)
        assert values.shape == (16_000,) and values.dtype == np.float32
        where = np.isnan(values)
        assert where.any() == (told.anomaly == "gap")
        filled = np.where(where, np.nanmean(values), values).astype(np.float64)
        scale = filled.std()
        rise = (np.median(filled[-1600:]) - np.median(filled[:1600])) / scale
        assert ("falling", "steady", "rising")[int(np.sign(round(rise))) + 1] == told.trend, rise
        line = np.linspace(filled[:1600].mean(), filled[-1600:].mean(), 16_000)
        power = np.abs(np.fft.rfft((filled - line) * np.hanning(16_000)))[20:]
        peak = 20 + int(power.argmax())
        if told.period != "never":
            assert 16_000 / peak == pytest.approx(int(told.period), rel=0.03)
        smooth = np.convolve(filled - line, np.ones(41) / 41, "same")
        if told.anomaly != "nothing" and told.period in ("never", "23"):
            at = {"gap": where.argmax(), "spike": smooth.argmax(), "dip": smooth.argmin()}[told.anomaly]
            assert series.TENTHS[at * 10 // 16_000] == told.tenth


def test_sentences_are_read_as_they_are_written(recipe: SimpleNamespace) -> None:
    series = recipe.series
    for trend, period, anomaly, tenth in product(series.TRENDS, series.PERIODS, series.ANOMALIES, series.TENTHS):
        told = series.Description(trend, period, anomaly, "-" if anomaly == "nothing" else tenth)
        ids = series.batch([told], torch.device("cpu"))["input_ids"][0].tolist()
        assert ids[0] == series.START and ids[-1] == series.END and series.parse(ids[1:]) == told
        assert series.parse([*ids[1:], 0, 1]) == told and len(ids) - 2 < recipe.train_series.LONGEST
    assert series.parse([series.IDS["samples"]]) == series.Description("?", "?", "?", "?")
