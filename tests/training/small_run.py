"""A small run of `train` on a tiny host: in this process, or in one of its own that dies at a chosen moment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

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


def attach(shard: bool = False, tensor_parallel: str | None = None, **settings: Any) -> Any:
    """A tiny host, whole or in pieces on several processes, with a fresh adapter after every layer."""
    host = tiny.make("llama")
    if shard or tensor_parallel is not None:
        # A process that waits for others in vain gives up before whoever started it does.
        torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=4))
    if tensor_parallel is not None:
        plan = DistributedConfig(tp_plan="auto")
        host = AutoModelForCausalLM.from_pretrained(
            tensor_parallel, distributed_config=plan, dtype=torch.float32
        ).eval()
    if shard:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for part in (*host.model.layers, host):
            fully_shard(part, mesh=mesh)
    torch.manual_seed(0)
    made = {"memory_dim": tiny.MEMORY_DIM, "every": 1, "num_heads": 2, "head_dim": 5} | settings
    return mmattn.attach(host, mmattn.GatedAdapter(**made))


def collator(folder: Path) -> training.RowCollator:
    """Of these rows, whose memories need no encoder."""
    return training.RowCollator(Letters())


class Killed:
    """Counts losses and saves, and ends this process as `kill -9` does at the ones that are named."""

    def __init__(
        self, loss: Any, at_loss: int | None = None, at_save: int | None = None, rank: int | None = None
    ) -> None:
        self.loss, self.at_loss, self.at_save, self.losses, self.saves = loss, at_loss, at_save, 0, 0
        if rank is not None and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) != (str(rank), "0"):
            self.at_loss = self.at_save = None  # one of several, and once

    def __call__(self, some: Any, seeds: Any) -> Any:
        found = self.loss(some, seeds)
        self.losses += torch.is_grad_enabled()
        if self.losses == self.at_loss:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def save(self, folder: Path) -> None:
        """Beside a checkpoint."""
        (folder / "half").write_text("half")
        self.saves += 1
        if self.saves == self.at_save:
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    folder: Path,
    *,
    model: Any = None,
    data: Sequence[training.Row] | None = None,
    batch_size: int = 6,
    dropout: float = 0.2,
    shard: bool = False,
    tensor_parallel: str | None = None,
    kill: dict[str, int] | None = None,
    eval_rows: Sequence[training.Row] | None = None,
    batches: Any = None,
    collated: bool = True,
    reported: bool = False,
    apart: float = 0.0,
    adapter: dict[str, Any] | None = None,
    hidden_states: str | Path | None = None,
    progress: bool = False,
    **settings: Any,
) -> tuple[training.TrainingResult, Any]:
    """Train for nine steps of six rows in two micro-batches, with everything that a checkpoint must bring back.

    With `reported` the losses of shuffled memories and the figures of the adapter are in the metrics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if apart and os.environ["RANK"] == "1":
        time.sleep(apart)
    model = attach(shard, tensor_parallel, **{"dropout": dropout} | (adapter or {})) if model is None else model
    rows_of = collator(folder)

    def collate(some: Sequence[training.Row], seeds: Sequence[int]) -> training.TextBatch:
        return rows_of.batch(some)

    def loss(some: Any, seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
        return training.sum_nats(model, some if collated else collate(some, seeds))

    chosen = {"max_steps": 9, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "gate_learning_rate": 0.1}
    chosen |= {"weight_decay": 0.1, "warmup_steps": 2, "ema_decay": 0.5, "eval_steps": 3, "save_steps": 2}
    chosen |= {"logging_steps": 1} | settings
    accelerator = training.make_accelerator(device="cpu")
    killed = Killed(loss, **(kill or {}))
    step = training.last_step(folder / "checkpoints")
    log = training.MetricsLog(accelerator, folder, step)
    held_out = rows(5) if eval_rows is None else eval_rows

    def forward() -> None:
        training.mean_loss(model, loss, held_out, 1, accelerator, collate=collate if collated else None)

    cached = training.cached_hidden_states(model, hidden_states) if hidden_states else contextlib.nullcontext()
    with cached:
        done = training.train(
            model,
            killed,
            training.RowBatches(rows() if data is None else data, batch_size, seed=3) if batches is None else batches,
            training.TrainingConfig(**chosen),
            accelerator,
            collate=collate if collated else None,
            eval_rows=held_out,
            shuffled_rows=shuffled(held_out) if reported else (),
            folder=folder / "checkpoints",
            log=log,
            measure=mmattn.inspect.AdapterMetrics(model, forward, 2) if reported else None,
            progress=progress,
            save_more=lambda where: (model.save_adapter(where / "adapter"), killed.save(where)),
        )
    assert not [name for name, p in model.host.named_parameters() if "lora_" not in name and p.grad is not None]
    if accelerator.is_main_process:
        model.save_adapter(folder / "adapter")
    training.end_training(accelerator)
    return done, model


def sha256(folder: Path) -> str:
    """Of the adapter that a run left."""
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def losses(folder: Path) -> list[float]:
    """Of each step, as the metrics have them."""
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
