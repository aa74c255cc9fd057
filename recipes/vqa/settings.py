"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Strict(BaseModel, extra="forbid"):
    """Settings; an unknown key is an error."""


class AdapterSettings(Strict):
    layers: list[int] = [24, 26, 28]  # hidden states below the first one are computed once
    num_heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=1)
    feed_forward: float = Field(2.0, ge=0)  # hidden width as a multiple of the host's


class OptimSettings(Strict):
    max_steps: int = Field(5000, ge=1)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    gate_learning_rate: float | None = Field(None, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(50, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    calibrate: bool = True  # False to see what the calibration of the blocks' norms is good for
    lora_steps: int = Field(100, ge=1)  # of 16 questions; there are 107
    lora_learning_rate: float = Field(2e-3, gt=0)

    def training_options(self) -> dict[str, Any]:
        """Return the arguments of `TrainingConfig`."""
        return self.model_dump(exclude={"batch_size", "lora_steps", "lora_learning_rate"})


class SpeechAdapterSettings(AdapterSettings):
    layers: list[int] = [20, 22]  # below the layers that see the picture


class SpeechSettings(Strict):
    encoder: str = "whisper-base"
    instruction: str = "Answer the spoken question about the picture."
    max_steps: int = Field(300, ge=1)
    voices: int | None = Field(None, ge=1)  # the first ones of training and of the test; None for all
    adapter: SpeechAdapterSettings = SpeechAdapterSettings()


class Config(Strict):
    out: str = "runs/vqa"
    seed: int = Field(0, ge=0)
    lm: str = "smollm2"
    encoder: str = "efficientnet-lite0"
    train_questions: int | None = Field(None, ge=1)  # of the 38,575, drawn once for all seeds; None for all
    test_questions: int | None = Field(None, ge=1)  # of the 9,673
    controls: bool = True  # the text-only LoRA
    cache: str = "runs/cache"  # encoded pictures, by encoder
    progress: bool = True
    device: Literal["auto", "cpu"] = "auto"
    adapter: AdapterSettings = AdapterSettings()
    optim: OptimSettings = OptimSettings()
    spoken: bool = False  # the question is heard, too: a second memory and a second adapter
    speech: SpeechSettings = SpeechSettings()
