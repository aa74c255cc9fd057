"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mmattn import training


class DataSettings(training.Settings):
    keys: int = Field(1000, ge=10, le=17_000)  # of three letters, each with a value
    values: int = Field(20, ge=2, le=31)  # numbers 0 to values - 1
    key_models: int = Field(1, ge=1, le=2)  # models that share the keys
    working: bool = True  # m_B writes the numbers down before the result; False: the result alone
    share: float = Field(0.2, gt=0, lt=1)  # of the keys, to train the composition on
    ask: int = Field(500, ge=1)  # measured expressions of each kind, of the other keys
    pool: int | None = Field(None, ge=1)  # training expressions to repeat; None: always new ones


class ModelSettings(training.Settings):
    width: int = Field(128, ge=8)
    depth: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    max_steps: int = Field(700, ge=1)
    batch_size: int = Field(160, ge=1)  # texts of a step
    pieces: int = Field(1, ge=1)  # prompts with answers in a text
    learning_rate: float = Field(3e-3, gt=0)
    weight_decay: float = Field(0.05, ge=0)


class KeyModelSettings(ModelSettings):
    depth: int = Field(3, ge=1)
    max_steps: int = Field(1800, ge=1)
    batch_size: int = Field(32, ge=1)
    pieces: int = Field(8, ge=1)
    weight_decay: float = Field(1.0, ge=0)  # its states then hold little besides the value


class AdapterSettings(training.Settings):
    layers: list[int] = [0, 1]
    augmenting_layers: list[int] = [2, 2]
    num_heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=2)
    feed_forward: float = Field(0.0, ge=0)
    rotary: bool = True
    own_place: bool = True


class FusedSettings(training.Settings):
    layers: list[int] = [0, 1]
    augmenting_layers: list[int] = [3, 3]  # the layer that `expand` adds, which caches what the last one computed
    hidden_dim: int = Field(84, ge=1)
    gate: str = "head"


class OptimSettings(training.OptimSettings):
    per_device_train_batch_size: int = Field(96, ge=1)
    learning_rate: float = Field(8e-3, gt=0)
    gate_learning_rate: float | None = Field(2e-2, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    bf16: bool = False


class Config(training.RunSettings):
    out: str = "runs/compose"
    controls: tuple[Literal["LoRA", "random", "vanilla"], ...] = ("LoRA", "random", "vanilla")
    data: DataSettings = DataSettings()
    anchor: str | None = None  # a pretrained language model as m_B; a LoRA in its upper layers learns arithmetic
    rank: int = Field(16, ge=1)  # rank of this LoRA
    ways: tuple[Literal["substitution", "KV-arithmetic", "all three"], ...] = (
        "substitution", "KV-arithmetic", "all three",
    )  # fmt: skip
    hidden_states: str | None = None  # a folder: the anchor's states below the adapters are cached
    key_model: KeyModelSettings = KeyModelSettings()  # m_A, which knows the keys
    arithmetic_model: ModelSettings = ModelSettings()  # m_B, which does arithmetic
    adapter: AdapterSettings = AdapterSettings()
    fused: FusedSettings | None = FusedSettings()
    lora_learning_rate: float | None = Field(None, gt=0)  # None: that of `optim`
    fused_learning_rate: float = Field(3e-3, gt=0)
    optim: OptimSettings = OptimSettings()

    @model_validator(mode="after")
    def _controls_have_their_measure(self) -> Config:
        if self.controls and "all three" not in self.ways:
            raise ValueError("controls are as large as the composition trained on all three: add it to ways")
        return self
