"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Strict(BaseModel, extra="forbid"):
    """Settings; an unknown key is an error."""


class DataSettings(Strict):
    kind: Literal["flora", "folder"] = "flora"
    path: str | None = None  # folder: one folder of pictures per class
    descriptions: str | None = None  # folder: the file of descriptions of each class (.json or .yaml)
    held_out: float = Field(0.1, gt=0, lt=1)  # folder: share of each class that is never trained on
    train_per_species: int = Field(40, ge=1)  # flora: drawings for training
    held_out_per_species: int = Field(6, ge=1)  # flora: further drawings for measuring
    size: int = Field(64, ge=16)  # flora: pixels a side
    flip: bool = True  # train on mirrored pictures, too
    cache: str = "runs/cache"  # encoded pictures, by encoder and contents


class AdapterSettings(Strict):
    every: int | None = Field(None, ge=1)  # by default 1, if `layers` are not named either
    layers: list[int] | None = None
    num_heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=1)
    num_kv_heads: int | None = 1
    feed_forward: float = Field(2.0, ge=0)


class OptimSettings(Strict):
    max_steps: int = Field(1200, ge=1)
    batch_size: int = Field(32, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    gate_learning_rate: float | None = Field(3e-2, gt=0)
    lora_learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    warmup_steps: int = Field(30, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    keep_fraction: float = Field(0.9, gt=0, le=1)  # share of the slots in view at each step
    cache_hidden_states: bool = False  # of the frozen layers below the adapter, for each text, in data.cache


class Config(Strict):
    out: str = "runs/vision"
    seed: int = Field(0, ge=0)
    encoder: str = "assets/clip"  # efficientnet-lite0, a folder, or another name of docs/encoders.md
    lm: str = "assets/lm"  # smollm2, a folder, or a name on the hub
    max_new_tokens: int = Field(64, ge=1)  # of a caption
    controls: bool = True  # the text-only LoRA; without it there is no "bits saved"
    progress: bool = True
    device: Literal["auto", "cpu"] = "auto"
    data: DataSettings = DataSettings()
    adapter: AdapterSettings = AdapterSettings()
    optim: OptimSettings = OptimSettings()
