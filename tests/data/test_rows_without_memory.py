"""Rows without a memory in the middle of training (Invariant 77): the others learn from theirs, and no loop stops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from mmattn import training
from tests import tiny
from tests.training import small_run
from tests.training.test_trainer import trainer, weights

WITH = [row for row in small_run.rows(12) if row.has_memory]
WITHOUT = [training.Row("abc"), training.Row("bcda"), training.Row("ha")]
PLAIN = {
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "save_strategy": "no",
    "max_grad_norm": 1.0,
    "gradient_accumulation_steps": 1,
}


def trained(folder: Path, rows: list[training.Row], model: Any = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Weights after an AdapterTrainer took these rows in this order."""
    made = trainer(folder, model or small_run.attach(dropout=0.0), **PLAIN | arguments)
    made.train_dataset = rows
    made.train()
    return weights(made.model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_without_any_memory_changes_nothing(tmp_path: Path, checkpointing: bool) -> None:
    """Invariant 77: a batch with memories, one without, one with: as if the second were not there."""
    given: dict[str, Any] = {"activation_checkpointing": checkpointing}
    if checkpointing:
        given["activation_checkpointing_kwargs"] = {"use_reentrant": False}
    got = trained(tmp_path / "a", WITH[:3] + WITHOUT + WITH[3:6], max_steps=3, **given)
    want = trained(tmp_path / "b", WITH[:6], max_steps=2)
    fresh = weights(small_run.attach(dropout=0.0))
    assert all(torch.equal(value, want[name]) for name, value in got.items())
    assert any(not torch.equal(value, fresh[name]) for name, value in got.items()), "the others learn"


def test_accumulated_with_others(tmp_path: Path) -> None:
    """Three micro-batches of one step, the middle one without any memory: the step is that of the rows in one batch."""
    rows = WITH[:3] + WITHOUT + WITH[3:6]
    got = trained(tmp_path / "a", rows, max_steps=1, gradient_accumulation_steps=3)
    want = trained(tmp_path / "b", rows, max_steps=1, per_device_train_batch_size=9)
    for name, value in got.items():
        assert torch.allclose(value, want[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("host", ["whole", "sharded"])
def test_two_processes_of_which_one_has_none(host: str, tmp_path: Path) -> None:
    """Invariant 77: of batches of six, the three rows of one process have memories and those of the other have none.

    A process of a sharded host must not wait for the gathering of weights in a backward pass that the other has not.
    """
    tiny.make("llama").save_pretrained(tmp_path / "sharded")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    paths = os.pathsep.join([str(small_run.ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    words += [str(tmp_path / "two"), *([str(tmp_path / "sharded")] if host == "sharded" else [])]
    found = subprocess.run(words, capture_output=True, text=True, env=env, timeout=280)
    assert found.returncode == 0, found.stderr
    got = torch.load(tmp_path / "two" / "weights.pt")
    want = trained(tmp_path / "one", mixed(), max_steps=2, per_device_train_batch_size=6)
    for name, value in got.items():
        assert torch.allclose(value, want[name], rtol=1e-4, atol=1e-6), name


def mixed() -> list[training.Row]:
    """Twelve rows, in batches of six: three with memory for the first process, three without for the second."""
    return WITH[:3] + WITHOUT + WITHOUT + WITH[3:6]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, model = Path(sys.argv[1]), None
    if len(sys.argv) > 2:
        sharing = DistributedConfig(fsdp_size=2)
        lm = AutoModelForCausalLM.from_pretrained(sys.argv[2], distributed_config=sharing).requires_grad_(False)
        model = small_run.attach(lm, dropout=0.0)
    found = trained(folder, mixed(), model, max_steps=2, per_device_train_batch_size=3)
    if os.environ["RANK"] == "0":
        torch.save(found, folder / "weights.pt")
    torch.distributed.destroy_process_group()
