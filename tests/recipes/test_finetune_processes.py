"""The recipe of fine-tuning in two processes: each with the host, with half of it, and computing it together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import call

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "finetune"


def losses(folder: Path) -> list[float]:
    """Of each step of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


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
    one = tmp_path / "one"
    assert start([], one).returncode == 0
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    accelerate = ["accelerate.commands.launch", "--config_file", str(RECIPE / "accelerate.yaml"), "-m"]
    half = "optim.per_device_train_batch_size=3"  # of each process
    for name, launch, settings in (
        ("accelerate", accelerate, (half,)),
        ("fsdp", torchrun, ("fsdp=true", half)),
    ):
        two = tmp_path / name
        found = start(launch, two, *settings)
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
