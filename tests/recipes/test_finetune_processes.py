"""The recipe of fine-tuning in two processes: each with the host, with half of it, and computing it together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.running import call
from tests.training.small_run import losses

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "finetune"


def four_steps(out: Path, *settings: str) -> list[str]:
    """The words after `mmattn` for a short run of the recipe's own settings, on the CPU."""
    return [
        "train", str(RECIPE / "config_tiny.yaml"), f"out={out}", "progress=false",
        "device=cpu", "data.held_out=2", f"data.cache={out.parent / 'cache'}", "adapter.every=3", "optim.max_steps=4",
        "optim.per_device_train_batch_size=6", "optim.logging_steps=1", "eval.eval_steps=2", *settings,
    ]  # fmt: skip


def start(launch: list[str], out: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """A run in processes of its own."""
    words = [sys.executable, "-m", *launch, "mmattn", *four_steps(out, *settings)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=280, cwd=out.parent)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """By torchrun and by accelerate; the table and the samples are the same, and each is written once."""
    one, without_dropout = tmp_path / "one", "adapter.dropout=0"  # each process draws masks of its own
    assert start([], one, without_dropout).returncode == 0
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    accelerate = ["accelerate.commands.launch", "--config_file", str(RECIPE / "accelerate.yaml"), "-m"]
    half = "optim.per_device_train_batch_size=3"  # of each process
    for name, launch, settings in (
        ("accelerate", accelerate, (half,)),
        ("fsdp", torchrun, ("fsdp=true", half)),
    ):
        two = tmp_path / name
        found = start(launch, two, without_dropout, *settings)
        assert found.returncode == 0, found.stderr[-3000:]
        assert losses(two) == pytest.approx(losses(one), rel=1e-5), name
        assert (two / "samples.txt").read_text() == (one / "samples.txt").read_text(), name
        there, here = (json.loads((at / "table.json").read_text())["rows"][0] for at in (two, one))
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-5), name
        assert (two / "adapter" / "adapter_model.safetensors").is_file()
    refused = start(torchrun, tmp_path / "refused", "tp_plan=auto")
    assert refused.returncode and "tp_plan=auto trains on GPUs" in refused.stderr
    plan = start(torchrun, tmp_path / "plan", "--dry-run")
    assert plan.returncode == 0, plan.stderr[-3000:]
    assert plan.stdout.count("steps: 4 of 12 rows in 2 processes") == 1 and not (tmp_path / "plan").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_restarts_when_a_process_is_killed(tmp_path: Path) -> None:
    """Invariant 76: the run resumes from its last complete checkpoint and ends bit for bit where an uninterrupted run
    does.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m"]
    settings = ("optim.per_device_train_batch_size=3", "optim.save_steps=2", "optim.max_steps=30", "eval.eval_steps=30")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    found = start(torchrun, whole, *settings)
    assert found.returncode == 0, found.stderr[-3000:]
    words = [sys.executable, "-m", *torchrun, "mmattn", *four_steps(killed, *settings)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "log", "w") as log, subprocess.Popen(words, stdout=log, stderr=log, env=env) as run:
        while not list(killed.glob("checkpoints/checkpoint-*/trainer_state.json")):
            assert run.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.02)
        workers = [child for child in psutil.Process(run.pid).children() if "mmattn" in child.cmdline()]
        assert len(workers) == 2
        workers[1].kill()
        assert run.wait(280) == 0, (tmp_path / "log").read_text()[-3000:]
    assert "resumes at step" in (tmp_path / "log").read_text()
    first, second = ((at / "adapter" / "adapter_model.safetensors").read_bytes() for at in (whole, killed))
    assert first == second and losses(killed) == losses(whole)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("fsdp=true",), "several processes, and there is one"),
        (("tp_plan=auto",), "several processes, and there is one"),
        (("fsdp=true", "tp_plan=auto"), "leave tp_plan and quantise out"),
        (("tp_plan=auto", "eval.controls=true"), "eval.controls"),
        (("host=unet", "fsdp=true"), "fsdp, lm is for another host"),
    ],
    ids=["one process", "alone", "both", "controls", "unet"],
)
def test_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], said: str
) -> None:
    """Refused in words, before anything is trained."""
    code, _, errors = call(capsys, *four_steps(tmp_path / "run", *settings))
    assert code == 2 and said in errors and not (tmp_path / "run" / "metrics.jsonl").exists()
