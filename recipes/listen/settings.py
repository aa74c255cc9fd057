"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mmattn import training


class OptimSettings(training.OptimSettings):
    max_steps: int = Field(600, ge=1)
    gate_learning_rate: float = Field(2e-2, gt=0)
    weight_decay: float = Field(0.02, ge=0)


class AdapterSettings(training.Settings):
    layers: list[int] | None = None
    every: int | None = 1
    num_heads: int = Field(4, ge=1)
    head_dim: int = Field(24, ge=1)
    feed_forward: float = Field(1.0, ge=0)
    null_slot: bool = True
    memory_norm: bool = True  # False keeps the size of values


# Speech --------------------------------------------------------------------------------------------------------------


class VoiceSettings(training.Settings):
    speakers: int = Field(200, ge=1, le=600)  # training speakers: each a voice at a speed and a pitch
    held_out: int = Field(3, ge=1)  # speeds and pitches for each of the eight held-out voices
    chatter: int = Field(30, ge=1, le=600)  # speakers in the background
    least: int = Field(2, ge=1)  # words of an utterance
    most: int = Field(5, ge=1)
    speed: tuple[int, int] = (220, 300)  # words in a minute
    pitch: tuple[int, int] = (30, 70)  # of espeak-ng's 0 to 99
    sampling_rate: int = Field(8000, ge=4000)
    cache: str = "runs/cache"  # spoken sound, by text


class NoiseSettings(training.Settings):
    seconds: float = Field(2.5, gt=0)  # of a clip
    snr: float = 0.0  # dB, of the voice to white noise and other voices together, when measured
    easiest: float = 6.0  # dB; in training it is drawn from `snr` up to here
    pause: tuple[float, float] = (0.1, 0.25)  # seconds between two words, where there is room for them
    talkers: int = Field(6, ge=1)  # voices in the background


class RecogniserSettings(OptimSettings):
    bands: int = Field(32, ge=8)  # of the mel scale
    window: float = Field(0.032, gt=0)  # seconds of a frame
    hop: float = Field(0.02, gt=0)  # seconds from one frame to the next
    width: int = Field(128, ge=8)
    convolutions: int = Field(5, ge=2)  # convolutions over the log-mel energies
    layers: int = Field(2, ge=1)  # of the language model
    heads: int = Field(4, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    places: float = Field(1.0, ge=0)  # weight of the loss of the convolutions: which word is spoken when
    adapter: AdapterSettings = AdapterSettings(head_dim=32, feed_forward=2.0, null_slot=False)
    max_steps: int = Field(1400, ge=1)
    per_device_train_batch_size: int = Field(16, ge=1)


class WhisperSettings(training.Settings):
    name: str = "whisper-base"
    window: int = Field(3, ge=1, le=30)  # seconds of its encoder, at least those of a clip
    clips: int = Field(1600, ge=2)  # training clips, encoded once


class SensorEncoderSettings(OptimSettings):
    width: int = Field(96, ge=8)
    convolutions: int = Field(4, ge=1)
    max_steps: int = Field(500, ge=1)
    learning_rate: float = Field(4e-3, gt=0)


class SensorSettings(training.Settings):
    bands: int = Field(4, ge=1)  # energies of the voice without the noise, per time step
    encoder: SensorEncoderSettings = SensorEncoderSettings()
    wrong: float = Field(0.1, ge=0, lt=1)  # share of training streams from another utterance
    passing: float = Field(0.01, gt=0, lt=1)  # share of such streams that pass the agreement threshold
    calibration: int = Field(500, ge=2)  # utterances of training speakers to set the threshold
    held_out: int = Field(600, ge=1)  # measured utterances
    adapter: AdapterSettings = AdapterSettings()
    optim: OptimSettings = OptimSettings(
        max_steps=700, per_device_train_batch_size=16, learning_rate=3e-3, gate_learning_rate=3e-2
    )


# Series --------------------------------------------------------------------------------------------------------------


class SeriesSettings(training.Settings):
    samples: int = Field(16_000, ge=1000)
    noise: float = Field(0.5, ge=0)  # deviation, beside a wave of amplitude 1
    patch: int = Field(64, ge=2)  # samples of a token
    position_features: int = Field(32, ge=2)
    train: int = Field(2500, ge=1)
    held_out: int = Field(500, ge=1)


class LanguageModelSettings(OptimSettings):
    width: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    max_steps: int = Field(150, ge=1)


class DescribingSettings(training.Settings):
    adapter: AdapterSettings = AdapterSettings(num_heads=8, head_dim=16, null_slot=False, memory_norm=False)
    optim: OptimSettings = OptimSettings(
        max_steps=1200, per_device_train_batch_size=16, learning_rate=3e-3, gate_learning_rate=3e-2
    )


class Config(training.RunSettings):
    out: str = "runs/listen"
    part: Literal["speech", "series"] = "speech"
    controls: bool = True  # LoRA of equal size, without a memory
    voices: VoiceSettings = VoiceSettings()
    noise: NoiseSettings = NoiseSettings()
    recogniser: RecogniserSettings = RecogniserSettings()
    whisper: WhisperSettings | None = None  # use Whisper as the recogniser instead of training one
    sensor: SensorSettings = SensorSettings()
    series: SeriesSettings = SeriesSettings()
    lm: LanguageModelSettings = LanguageModelSettings()
    describing: DescribingSettings = DescribingSettings()

    @model_validator(mode="after")
    def _fits_whisper(self) -> Config:
        if self.whisper and (self.voices.sampling_rate != 16_000 or self.noise.seconds > self.whisper.window):
            raise ValueError("whisper needs voices.sampling_rate=16000, and noise.seconds up to whisper.window")
        return self
