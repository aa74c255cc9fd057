"""Runs of the AdapterTrainer in their folders: killed and taken up again they end bit for bit the same."""

from __future__ import annotations

import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import training
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError
from mmattn.training.trainer import last_complete
from tests.training import small_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    small_run.run(folder)
    return folder


@pytest.mark.slow
def test_killed_and_taken_up_it_ends_bit_for_bit_the_same(whole: Path, tmp_path: Path) -> None:
    """Invariant 76: killed inside an accumulation, and in the middle of writing a checkpoint."""
    found = small_run.start(tmp_path, kill={"at_loss": 10})  # the second part of step 5; a checkpoint is at step 4
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert str(last_complete(tmp_path / "checkpoints")).endswith("checkpoint-4")
    found = small_run.start(tmp_path, kill={"at_save": 2})  # steps 5 to 8, of which 8 is half written
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert str(last_complete(tmp_path / "checkpoints")).endswith("checkpoint-6")
    assert small_run.run(tmp_path).state.global_step == 9
    assert small_run.sha256(tmp_path) == small_run.sha256(whole)
    assert small_run.losses(tmp_path) == small_run.losses(whole) and len(small_run.losses(whole)) == 9


def test_a_resumed_run_says_so_and_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 131."""
    small_run.run(tmp_path, max_steps=4)
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-4")
    capsys.readouterr()
    small_run.run(tmp_path, max_steps=4, progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training")]
    assert lines[0] == "training resumes at step 2 of 4" and len(lines) == 3
    assert [line.split()[1] for line in lines[1:]] == ["3/4", "4/4"]
    assert len(small_run.losses(tmp_path)) == 4


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """Two processes of three rows learn what one does of six, in two parts: until accelerate fills the last batch."""
    one, two = tmp_path / "one", tmp_path / "two"
    small_run.run(one, dropout=0.0, max_steps=3)
    found = small_run.start(two, processes=2, dropout=0.0, max_steps=3, gradient_accumulation_steps=1)
    assert found.returncode == 0, found.stderr
    assert small_run.losses(two) == pytest.approx(small_run.losses(one), rel=1e-4)
    assert len(small_run.losses(two)) == 3


def test_a_checkpoint_of_another_adapter_or_a_damaged_one_is_refused(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(AdapterFileError, match="trained tensors differ"):
        small_run.run(copy, model=small_run.attach(feed_forward=0))
    for name in ("checkpoint-8", "checkpoint-9"):
        file = copy / "checkpoints" / name / "trained.safetensors"
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert last_complete(copy / "checkpoints") is None


def test_settings_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Refused where they differ; those that are free, and the place, may."""
    run = training.RunFolder(tmp_path)
    settings: dict[str, Any] = {"out": "here", "seed": 0, "optim": {"max_steps": 3}, "eval": {"controls": True}}
    run.check_settings(settings)
    run.write_config(settings)
    run.check_settings(settings | {"out": "there", "eval": {"controls": False}}, free=("eval",))
    with pytest.raises(ConfigError, match=r"seed: 0 there, 1 here; optim\.max_steps: 3 there, 4 here"):
        run.check_settings(settings | {"seed": 1, "optim": {"max_steps": 4}})


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    """It raises in its step; nothing is learned from it."""

    class Lost(training.AdapterTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return next(iter(self.model.adapters.parameters())).sum() * math.nan  # type: ignore[union-attr]

    model = small_run.attach()
    arguments = training.OptimSettings(max_steps=3).arguments(training.RunSettings(out=str(tmp_path), device="cpu"))
    trainer = Lost(model, arguments, data_collator=lambda rows: {"rows": rows}, train_dataset=range(7), calibrate=False)
    with pytest.raises(NonFiniteError, match="the loss is nan at step 0: lower the learning rate"):
        training.RunFolder(tmp_path).train(trainer, "lost", progress=False)
    assert all(parameter.isfinite().all() for parameter in model.adapters.parameters())


def test_the_metrics_of_an_adapter_and_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gates are measured in the steps that are logged; an adapter that learns nothing ignores its memory."""
    model = small_run.attach(dropout=0.0)
    small_run.run(
        tmp_path, model=model, learning_rate=0.0, gate_learning_rate=0.0, progress=True, logging_steps=2, max_steps=9,
        measure=mmattn.inspect.AdapterMetrics(model),
    )  # fmt: skip
    lines = [line for line in training.read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 9] and all(line["gate/layer_0"] == 0 for line in lines)
    assert capsys.readouterr().out.count("the adapter ignores its memory so far: up to step 9") == 1
