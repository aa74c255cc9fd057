"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from pydantic import Field

from mmattn import training


class DataSettings(training.Settings):
    path: str = "assets/flowers/pictures"  # one folder of pictures per class
    descriptions: str = "assets/flowers/descriptions.json"  # of each class (.json or .yaml)
    held_out: float = Field(0.1, gt=0, lt=1)  # held-out share of each class
    flip: bool = True  # train on mirrored pictures, too
    cache: str = "runs/cache"  # encoded pictures, by encoder and contents


class AdapterSettings(training.Settings):
    every: int | None = Field(None, ge=1)  # 1 by default, without `layers`
    layers: list[int] | None = None
    num_heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=1)
    num_kv_heads: int | None = 1
    feed_forward: float = Field(2.0, ge=0)


class OptimSettings(training.OptimSettings):
    max_steps: int = Field(1200, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    gate_learning_rate: float | None = Field(3e-2, gt=0)
    lora_learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    warmup_steps: int = Field(30, ge=0)
    keep_fraction: float = Field(0.9, gt=0, le=1)  # share of the slots in view at each step
    cache_hidden_states: bool = False  # of the frozen layers below the adapter, for each text, in data.cache


class Config(training.RunSettings):
    out: str = "runs/vision"
    encoder: str = "assets/clip"  # efficientnet-lite0, a folder, or another name of docs/encoders.md
    lm: str = "assets/lm"  # smollm2, a folder, or a name on the hub
    max_new_tokens: int = Field(64, ge=1)  # of a caption
    controls: bool = True  # the text-only LoRA; without it there is no "bits saved"
    data: DataSettings = DataSettings()
    adapter: AdapterSettings = AdapterSettings()
    optim: OptimSettings = OptimSettings()
