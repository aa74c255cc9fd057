"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmattn import training


class DataSettings(training.Settings):
    pairs: str | None = None  # a file of "source<tab>target" lines; null: dates and numbers from the Unicode CLDR
    held_out: int = Field(500, ge=1)  # held-out source sentences
    written: int = Field(12_000, ge=20)  # dates and numbers to write
    languages: tuple[str, ...] = ("fr", "de", "es", "it", "nl")  # to write them in
    vocabulary: int = Field(2000, ge=300)  # byte-level BPE, one for both sides
    max_tokens: int = Field(60, ge=4)  # of a sentence, with start and end; longer sentences are not trained on


class ModelSettings(training.Settings):
    dim: int = Field(192, ge=2)
    num_heads: int = Field(6, ge=1)
    layers: int = Field(3, ge=1)
    feed_forward: float = Field(4.0, gt=0)
    dropout: float = Field(0.2, ge=0, lt=1)
    positions: Literal["sinusoidal", "learned", "rotary", "alibi"] = "rotary"


class OptimSettings(training.OptimSettings):
    max_steps: int = Field(1500, ge=1)
    per_device_train_batch_size: int = Field(64, ge=1)  # pairs of like length
    weight_decay: float = Field(0.05, ge=0)
    warmup_steps: int = Field(150, ge=0)
    label_smoothing_factor: float = Field(0.1, ge=0, lt=1)


class WritingSettings(training.Settings):
    beams: int = Field(4, ge=1)
    length_penalty: float = 1.0
    batch: int = Field(64, ge=1)


class AlignmentSettings(training.Settings):
    sentences: int = Field(10, ge=1)  # of the picture


class Config(training.RunSettings):
    out: str = "runs/translate"
    controls: bool = True  # the other three position codes and no cross-attention, trained as long
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    optim: OptimSettings = OptimSettings()
    writing: WritingSettings = WritingSettings()
    alignment: AlignmentSettings = AlignmentSettings()
