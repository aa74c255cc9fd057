"""Settings shared by recipes: of a run, and of its optimizer, which become `transformers.TrainingArguments`."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from transformers import TrainingArguments


class Settings(BaseModel, extra="forbid"):
    """Settings of a recipe; an unknown key is an error."""


class RunSettings(Settings):
    """Settings that every run has."""

    out: str = "runs/run"
    seed: int = Field(0, ge=0)
    device: Literal["auto", "cpu"] = "auto"
    progress: bool = True


class OptimSettings(Settings):
    """Settings of a training.

    Fields of `transformers.TrainingArguments` mean the same here. A recipe may add fields, which it reads itself, and
    change defaults.
    """

    max_steps: int = Field(1000, ge=1)
    per_device_train_batch_size: int = Field(32, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(50, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    lr_scheduler_type: str = "cosine"
    logging_steps: int = Field(20, ge=1)

    def arguments(self, run: RunSettings, **fields: Any) -> TrainingArguments:
        """Return the arguments of a Trainer for these settings.

        Args:
            run: settings of the run.
            **fields: fields of `TrainingArguments`, which override the settings.
        """
        from transformers import TrainingArguments

        _join_restarted(run.device == "cpu" or not torch.accelerator.is_available())
        names = {field.name for field in dataclasses.fields(TrainingArguments)}
        chosen = {name: value for name, value in self.model_dump().items() if name in names and value is not None}
        defaults = {
            "output_dir": run.out,
            "seed": run.seed,
            "use_cpu": run.device == "cpu",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        return TrainingArguments(**defaults | chosen | fields)


def _join_restarted(cpu: bool) -> None:
    """Join the processes that torchrun has started again, under keys of this start.

    All starts share one store, in which a process that comes first would find the addresses of those that are gone.
    """
    start, env = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ
    if start == "0" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    shared = torch.distributed.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), world, is_master=False)
    store = torch.distributed.PrefixStore(f"start {start}", shared)
    torch.distributed.init_process_group("gloo" if cpu else None, store=store, rank=rank, world_size=world)
