"""Every setting of this recipe, with its default. Unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from mmattn import training


class DataSettings(training.Settings):
    # a .jsonl file, a folder of pictures with texts, a dataset of Hugging Face, tars of webdataset, a Lance dataset, or
    # a dataset that `mmattn encode` made, here or at an address
    path: str = "assets/flora"
    split: str | None = None  # of a dataset of Hugging Face, or of folders train, val, test; "train" by default
    streaming: bool = False  # read it as it arrives; needs optim.max_steps
    columns: dict[str, str] | None = None  # key of a row: column of the dataset, or ending in tars; by default the same
    template: str | None = None  # the text of a picture in a class folder; by default "A photo of a {label}."
    strict: bool = False  # stop at a picture or line that cannot be used, instead of leaving it out and naming it
    # never trained on: a share, or from 1 on a number of rows (a stream's first); by default the split val or test of
    # the data, and a tenth where it has none
    held_out: float | None = Field(None, ge=0)
    max_length: int | None = Field(None, ge=3)  # tokens of a row; by default what the language model can read
    truncation: bool = False  # shorten longer texts instead of refusing them
    packing: bool = False  # language: several texts share a row, each with its own memory, so that little is padding
    cache: str = "runs/cache"  # memories are cached here, by encoder and content


class AdapterSettings(training.Settings):
    every: int | None = Field(None, ge=1)
    layers: list[int] | None = None  # by default every second one of the upper six
    num_heads: int | None = Field(None, ge=1)  # by default 8 heads of 64, fewer and narrower beside a narrow host
    head_dim: int | None = Field(None, ge=1)
    num_kv_heads: int | None = None
    feed_forward: float = Field(1.0, ge=0)  # hidden width as a multiple of the host's; 0: none
    gate: Literal["scalar", "head", "channel"] = "scalar"
    qk_norm: bool = False
    null_slot: bool = False
    dropout: float = Field(0.2, ge=0, lt=1)  # of attention weights
    latents: int | None = None  # a Perceiver resampler with so many latents in front


class DecoupledSettings(training.Settings):
    tokens: int | None = None
    blocks: list[str] | None = None
    start: Literal["nothing", "host"] = "nothing"
    latents: int | None = None
    conditioning_dropout_prob: float = Field(0.1, ge=0, lt=1)  # of the text, and of the memory, for guidance
    min_snr: float = Field(5.0, gt=0)  # arXiv 2303.09556


class LoraSettings(training.Settings):
    rank: int = Field(0, ge=0)  # a LoRA on the language model, trained beside the adapter; 0: none
    dropout: float = Field(0.0, ge=0, lt=1)


class OptimSettings(training.OptimSettings):
    max_steps: int = -1  # overrides num_train_epochs where it is above 0
    num_train_epochs: float | None = Field(None, gt=0)  # by default 400 steps or 20 epochs, the longer of them
    per_device_train_batch_size: int = Field(8, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    gate_learning_rate: float | None = Field(3e-2, gt=0)
    lora_learning_rate: float = Field(1e-3, gt=0)  # of the control
    weight_decay: float = Field(0.05, ge=0)
    warmup_steps: int = Field(10, ge=0)
    logging_steps: int = Field(10, ge=1)
    save_steps: int = Field(100, ge=1)
    save_total_limit: int = Field(2, ge=1)  # checkpoints
    dataloader_num_workers: int = Field(0, ge=0)  # processes that read and collate rows
    bf16: bool = False
    fp16: bool = False
    torch_compile: bool = False  # language: results differ by rounding
    checkpoint_adapters: bool = False  # compute activations of the adapters again in the backward pass
    checkpoint_host: bool = False  # and those of the host
    cache_hidden_states: bool = False  # language: of the frozen layers below the adapter, for each text, in data.cache
    report_to: list[str] = []  # trackers besides metrics.jsonl: tensorboard, wandb, mlflow


class EvalSettings(training.Settings):
    eval_steps: int = Field(50, ge=0)  # steps between two evaluations; 0: never
    early_stopping_patience: int = Field(0, ge=0)  # evaluations without a lower loss; 0: no early stopping
    shuffled_memory: bool = True  # measure the loss with the memories of other rows, too: a warning if it is the same
    controls: bool = False  # no memory, shuffled memory, and a text-only LoRA of equal size, trained as long


class CaptionSettings(training.Settings):
    prompt: str = ""
    max_new_tokens: int = Field(64, ge=1)
    num_beams: int = Field(1, ge=1)


class Config(training.RunSettings):
    out: str = "runs/finetune"
    host: Literal["language", "unet"] = "language"
    lm: str = "smollm2"  # language: a short name, a folder, or a name on the hub
    quantise: Literal["int8", "bnb8", "bnb4"] | None = None  # language: by torchao, or by bitsandbytes
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # language: of the frozen weights
    fsdp: bool = False  # language: its weights are sharded over the processes by FSDP2
    tp_plan: Literal["auto"] | None = None  # language: the processes compute its layers together, tensor parallel
    unet: str = "assets/diffusion"  # unet: a run of recipes/diffusion, or Stable Diffusion 1, 2 or XL
    encoder: str = "efficientnet-lite0"  # of pictures; any name of docs/encoders.md, or a folder
    text_encoder: str = "minilm"  # of passages; minilm, any encoder of Hugging Face, or a folder of open_clip
    captions: Literal["auto", "host", "memory"] = "auto"  # unet: read by its own text encoder, or by `text_encoder` as
    # a part of the memory; auto: in the memory where its own never saw some of the words
    pooling: Literal["mean", "cls", "max", "none"] = "none"  # of passages; none: a slot for every token
    resume: bool = True  # go on from the last checkpoint in `out`; false: begin anew
    data: DataSettings = DataSettings()
    adapter: AdapterSettings = AdapterSettings()  # language
    decoupled: DecoupledSettings = DecoupledSettings()  # unet
    lora: LoraSettings = LoraSettings()
    optim: OptimSettings = OptimSettings()
    eval: EvalSettings = EvalSettings()
    caption: CaptionSettings = CaptionSettings()

    @property
    def called_together(self) -> bool:
        """Return True if all processes must call the host for one of them to have an answer."""
        return self.fsdp or self.tp_plan is not None

    @model_validator(mode="after")
    def _fits_its_host(self) -> Config:
        others = {
            "language": ("unet", "decoupled", "captions"),
            "unet": ("lm", "quantise", "dtype", "fsdp", "tp_plan", "adapter", "lora", "caption"),
        }[self.host]
        fields = type(self).model_fields
        wrong = sorted(name for name in others if getattr(self, name) != fields[name].default)
        if self.host == "unet":
            names = ("cache_hidden_states", "torch_compile")
            optim = type(self.optim).model_fields
            wrong += [f"optim.{name}" for name in names if getattr(self.optim, name) != optim[name].default]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} is for another host than host: {self.host}")
        if self.fsdp + bool(self.tp_plan) + bool(self.quantise) > 1:
            raise ValueError("fsdp, tp_plan and quantise exclude each other: leave tp_plan and quantise out")
        if self.called_together and self.optim.cache_hidden_states:
            raise ValueError("all processes call the host together with fsdp or tp_plan: leave cache_hidden_states out")
        if self.tp_plan and (self.eval.controls or self.lora.rank):
            raise ValueError("a LoRA cannot be put on a tensor parallel host: leave eval.controls and lora.rank out")
        return self

    def arguments(self, **fields: Any) -> Any:
        """Return the `TrainingArguments` of a training; evaluations are those of the settings."""
        evaluation = self.eval
        options: dict[str, Any] = {
            "output_dir": f"{self.out}/checkpoints",
            # Transformers has no optimizer state of a host in pieces to go on from.
            "save_strategy": "no" if self.called_together else "steps",
            "eval_strategy": "steps" if evaluation.eval_steps else "no",
            "eval_steps": evaluation.eval_steps or None,
            "per_device_eval_batch_size": self.optim.per_device_train_batch_size,
            "prediction_loss_only": True,
            "dataloader_pin_memory": self.device != "cpu" and torch.cuda.is_available(),
            "load_best_model_at_end": bool(evaluation.early_stopping_patience),
            "metric_for_best_model": "right_loss",
        }
        if evaluation.early_stopping_patience:
            options["save_steps"] = evaluation.eval_steps
        return self.optim.arguments(self, **options | fields)
