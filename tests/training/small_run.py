"""A small run of `AdapterTrainer` on a tiny host: in this process, or in another that dies when told."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments

import mmattn
from mmattn import training
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


class Letters:
    """A tokenizer of small letters: 0 pads, 1 begins, 2 ends, 3 is an "a"."""

    pad_token_id, bos_token_id, eos_token_id, unk_token_id = 0, 1, 2, None
    all_special_ids = (0, 1, 2)

    def __call__(self, texts: Sequence[str], **options: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) - ord("a") + 3 for letter in text] for text in texts]}


def rows(count: int = 23) -> list[training.Row]:
    """Rows of unequal length; every third has no memory, and the others have some of unequal length."""
    made, chance = [], random.Random(5)
    for i in range(count):
        text = "".join(chance.choice("abcdefgh") for _ in range(2 + i % 7))
        random_ = torch.Generator().manual_seed(i)
        memory = mmattn.Memory(torch.randn(1, 2 + i % 5, tiny.MEMORY_DIM, generator=random_)) if i % 3 else None
        made.append(training.Row(text, prompt="ab" if i % 4 == 1 else "", memory=memory))
    return made


def shuffled(rows: Sequence[training.Row]) -> list[training.Row]:
    """Rows with a memory, each with that of the next; the others as they are."""
    memories = [row.memory for row in rows if row.has_memory]
    moved = iter([*memories[1:], *memories[:1]])
    return [replace(row, memory=next(moved)) if row.has_memory else row for row in rows]


def attach(host: Any = None, **settings: Any) -> Any:
    """A tiny host with a fresh adapter after every layer."""
    torch.manual_seed(0)
    made = {"memory_dim": tiny.MEMORY_DIM, "every": 1, "num_heads": 2, "head_dim": 5} | settings
    return mmattn.attach(host or tiny.make("llama"), mmattn.GatedAdapter(**made))


def collator() -> training.RowCollator:
    """Of these rows, whose memories need no encoder."""
    return training.RowCollator(Letters())


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Of a training on the CPU that saves nothing, unless told, and reports to nobody."""
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(str(folder), **quiet | {"use_cpu": True, "dataloader_pin_memory": False} | more)


class Shapes(TorchDispatchMode):
    """Notes the shape of each tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [one.shape for one in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(one)]
        return out


class Killed(training.AdapterTrainer):
    """Ends this process, as `kill -9` does, in the micro-batch or the save that is named, counted from 1."""

    def __init__(self, *args: Any, at_loss: int | None = None, at_save: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at_loss, self.at_save, self.losses, self.saves = at_loss, at_save, 0, 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.losses += 1
        if self.losses == self.at_loss:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        super()._save(*args, **kwargs)
        self.saves += 1
        if self.saves == self.at_save:
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    folder: Path,
    *,
    model: Any = None,
    data: Any = None,
    dropout: float = 0.2,
    kill: dict[str, int] | None = None,
    adapter: dict[str, Any] | None = None,
    hidden_states: str | Path | None = None,
    measure: Any = None,
    progress: bool = False,
    resume: bool = True,
    callbacks: Any = None,
    gate_learning_rate: float = 0.1,
    **given: Any,
) -> training.AdapterTrainer:
    """Train for nine steps of six rows in two micro-batches, with everything that a checkpoint must bring back."""
    model = attach(**{"dropout": dropout} | (adapter or {})) if model is None else model
    chosen = {
        "max_steps": 9, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 1e-2,
        "weight_decay": 0.1, "warmup_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps",
        "save_steps": 2, "save_total_limit": 2, "logging_steps": 1, "prediction_loss_only": True,
    }  # fmt: skip
    held_out = rows(5)
    trainer = Killed(
        model,
        arguments(folder / "checkpoints", **chosen | given),
        data_collator=collator(),
        train_dataset=rows() if data is None else data,
        eval_dataset={"right": held_out, "shuffled": shuffled(held_out)},
        gate_learning_rate=gate_learning_rate,
        callbacks=callbacks,
        **(kill or {}),
    )
    cached = training.cached_hidden_states(model, hidden_states) if hidden_states else contextlib.nullcontext()
    with cached:
        training.RunFolder(folder).train(trainer, "training", progress, resume, measure)
    assert not [name for name, p in model.host.named_parameters() if "lora_" not in name and p.grad is not None]
    if trainer.is_world_process_zero():
        model.save_adapter(folder / "adapter")
    return trainer


def sha256(folder: Path) -> str:
    """Of the adapter that a run left."""
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def losses(folder: Path) -> list[float]:
    """Of each step, as the metrics have them."""
    return [line["loss"] for line in training.read_metrics(folder / "metrics.jsonl") if "loss" in line]


def start(
    folder: Path, processes: int = 1, restarts: int = 0, script: str = __file__, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """The same run, or another script, in a process, or in several that torchrun starts again when one dies."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    launch += [f"--max-restarts={restarts}"] if restarts else []
    words = [sys.executable, *launch, script, str(folder), json.dumps(settings)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=280)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), **json.loads(sys.argv[2]))
