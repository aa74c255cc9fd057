"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from pydantic import Field, model_validator

from mmattn import training


class AdapterSettings(training.Settings):
    layers: list[int] = [24, 26, 28]  # hidden states below the first one are computed once
    num_heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=1)
    feed_forward: float = Field(2.0, ge=0)  # hidden width as a multiple of the host's


class OptimSettings(training.OptimSettings):
    max_steps: int = Field(5000, ge=1)
    per_device_train_batch_size: int = Field(64, ge=1)
    gate_learning_rate: float | None = Field(None, gt=0)  # None is `learning_rate`
    calibrate: bool = True  # False to see what the calibration of the blocks' norms is good for
    lora_steps: int = Field(100, ge=1)  # of 16 questions; there are 107
    lora_learning_rate: float = Field(2e-3, gt=0)


class SpeechAdapterSettings(AdapterSettings):
    layers: list[int] = [20, 22]  # below the layers that see the picture


class SpeechSettings(training.Settings):
    encoder: str = "whisper-base"
    instruction: str = "Answer the spoken question about the picture."
    max_steps: int = Field(300, ge=1)
    voices: int | None = Field(None, ge=1)  # the first ones of training and of the test; None for all
    adapter: SpeechAdapterSettings = SpeechAdapterSettings()


class Config(training.RunSettings):
    out: str = "runs/vqa"
    lm: str = "smollm2"
    encoder: str = "efficientnet-lite0"
    train_questions: int | None = Field(None, ge=1)  # of the 38,575, drawn once for all seeds; None for all
    test_questions: int | None = Field(None, ge=1)  # of the 9,673
    spellings: int = Field(1, ge=1, le=4)  # of each question; 1 is with a capital letter and "?"
    start: str | None = None  # folder of an adapter to go on from; `adapter` is for a new one
    controls: bool = True  # the text-only LoRA
    cache: str = "runs/cache"  # encoded pictures, by encoder
    adapter: AdapterSettings = AdapterSettings()
    optim: OptimSettings = OptimSettings()
    spoken: bool = False  # the question is heard, too: a second memory and a second adapter
    speech: SpeechSettings = SpeechSettings()

    @model_validator(mode="after")
    def _uses_all_settings(self) -> Config:
        if self.start is not None and self.adapter != AdapterSettings():
            raise ValueError("start goes on from an adapter as it is: leave adapter out")
        if self.spoken and (self.start is not None or self.spellings > 1):
            raise ValueError("start and spellings are for questions as texts: leave them out, or spoken")
        return self
