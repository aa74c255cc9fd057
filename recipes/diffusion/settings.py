"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DataSettings(Strict):
    kind: Literal["digits", "folder", "torchvision"] = "digits"
    path: str | None = None  # folder: one folder of pictures per class; torchvision: where the dataset lies
    name: str | None = None  # torchvision: its class, such as MNIST
    options: dict[str, Any] = {}  # torchvision: further arguments of that class
    download: bool = False  # torchvision: fetch it into `path`
    attributes: Literal["ink", "light"] = "ink"  # what is measured and named: of writing, or of any other pictures
    held_out: float = Field(0.2, gt=0, lt=1)  # share that is never trained on, where the data is not split already
    most: int = Field(4000, ge=2)  # pictures to train on, and a quarter as many to measure


class ModelSettings(Strict):
    kind: Literal["unet", "transformer"] = "unet"  # of stage A; stage B takes what it is given
    size: int = Field(16, ge=8)  # pixels a side
    channels: tuple[int, ...] = (32, 64, 64)  # unet: of each level
    patch: int = Field(4, ge=1)  # transformer: pixels a side of what is one token
    layers: int = Field(5, ge=2)  # transformer
    heads: int = Field(4, ge=1)  # transformer
    head_dim: int = Field(32, ge=2)  # transformer

    @model_validator(mode="after")
    def fits(self) -> ModelSettings:
        """Refuse a transformer whose picture or width cannot be cut into equal parts."""
        width = self.heads * self.head_dim
        if self.kind == "transformer" and self.size % self.patch:
            raise ValueError(f"{self.size} pixels a side are no whole number of patches of {self.patch}")
        if self.kind == "transformer" and width % 4:
            raise ValueError(f"{self.heads} heads of {self.head_dim} are {width} wide: a multiple of 4 is needed")
        return self


class OptimSettings(Strict):
    max_steps: int = Field(5000, ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(100, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    min_snr: float = Field(5.0, gt=0)  # arXiv 2303.09556
    ema_decay: float = Field(0.999, ge=0, lt=1)


class SampleSettings(Strict):
    steps: int = Field(20, ge=1)
    guidance_scale: float = 2.0  # as in diffusers: 1 is no guidance
    each: int = Field(6, ge=1)  # pictures per question of the table
    examples: int = Field(359, ge=1)  # held-out examples of the table, at most
    every: int = Field(1000, ge=1)  # a grid of samples every so many training steps


class StyleSettings(Strict):
    encoder_steps: int = Field(800, ge=1)
    control: bool = True  # also train the concatenated way


class Config(Strict):
    out: str = "runs/diffusion"
    stage: Literal["text", "style"] = "text"
    unet: str = "assets/diffusion"  # style: what stays frozen; a run of stage A of either kind, or a Stable Diffusion
    seed: int = Field(0, ge=0)
    device: Literal["auto", "cpu"] = "auto"
    conditioning_dropout_prob: float = Field(0.1, ge=0, lt=1)  # of each condition in training, for guidance
    progress: bool = True
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    optim: OptimSettings = OptimSettings()
    sample: SampleSettings = SampleSettings()
    style: StyleSettings = StyleSettings()
