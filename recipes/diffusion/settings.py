"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmattn import training


class ModelSettings(training.Settings):
    kind: Literal["unet", "transformer"] = "unet"  # of stage A; stage B reads `unet`
    size: int = Field(16, ge=8)  # pixels a side
    channels: tuple[int, ...] = (32, 64, 64)  # unet: of each level
    patch: int = Field(4, ge=1)  # transformer: pixels a side of a token; divides `size`
    layers: int = Field(5, ge=2)  # transformer
    heads: int = Field(4, ge=1)  # transformer
    head_dim: int = Field(32, ge=2)  # transformer


class OptimSettings(training.OptimSettings):
    max_steps: int = Field(5000, ge=1)
    per_device_train_batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(100, ge=0)
    min_snr: float = Field(5.0, gt=0)  # arXiv 2303.09556
    ema_decay: float = Field(0.999, ge=0, lt=1)


class SampleSettings(training.Settings):
    steps: int = Field(20, ge=1)
    guidance_scale: float = 2.0  # as in diffusers: 1 is no guidance
    each: int = Field(6, ge=1)  # pictures per prompt of the table
    examples: int = Field(359, ge=1)  # held-out examples of the table, at most


class StyleSettings(training.Settings):
    encoder_steps: int = Field(800, ge=1)
    control: bool = True  # also train on examples concatenated with the text


class Config(training.RunSettings):
    out: str = "runs/diffusion"
    stage: Literal["text", "style"] = "text"
    unet: str = "assets/diffusion"  # style: the frozen host; a run of stage A of either kind, or a Stable Diffusion
    conditioning_dropout_prob: float = Field(0.1, ge=0, lt=1)  # of each condition in training, for guidance
    model: ModelSettings = ModelSettings()
    optim: OptimSettings = OptimSettings()
    sample: SampleSettings = SampleSettings()
    style: StyleSettings = StyleSettings()
