"""Trackers of accelerate: settings and metrics of a run, read back with their own readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmattn import training

SETTINGS = {"recipe": "finetune", "optim": {"save_steps": 2}}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tracker asks anything of a network, and none writes anywhere else."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_DATA_DIR": str(tmp_path / "data"),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)


def run(folder: Path, *names: str, resumed_step: int = 0, figure: float = 1.0) -> None:
    """Two trainings of four steps in one run."""
    accelerator = training.make_accelerator(
        folder, device="cpu", trackers=names, settings=SETTINGS, resumed_step=resumed_step
    )
    for prefix in ("adapter", "lora"):
        log = training.MetricsLog(accelerator, folder, resumed_step, name=f"metrics_{prefix}", prefix=prefix)
        for step in range(resumed_step + 1, 5):
            log(step=step, loss=figure, word="left out")
    training.end_training(accelerator)


def test_a_resumed_run_goes_on_in_tensorboard(tmp_path: Path) -> None:
    """What was logged after the checkpoint is not there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "tensorboard")
    run(tmp_path, "tensorboard", resumed_step=2, figure=2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert sorted(events.Tags()["scalars"]) == ["adapter/loss", "lora/loss"]
    found = {one.step: one.value for one in events.Scalars("adapter/loss")}
    assert found == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    lines = training.read_metrics(tmp_path / "metrics_lora.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run(tmp_path / "run", "mlflow")
    client: Any = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'mmattn'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run" and found.data.params["optim.save_steps"] == "2"
    history = client.get_metric_history(found.info.run_id, "lora/loss")
    assert [(one.step, one.value) for one in history] == [(step, 1.0) for step in range(1, 5)]


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path) -> None:
    """Two trainings count their steps by themselves, which its own count of steps would not allow."""
    wandb = pytest.importorskip("wandb")
    run(tmp_path / "run", "wandb")
    wandb.teardown()  # as at the end of a process: the log is written by another one, which takes its time
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    raw = log.read_bytes()
    for name in ("adapter/loss", "lora/loss", "lora/step", "optim.save_steps"):
        assert name.encode() in raw, name
    assert raw.count(json.dumps("finetune").encode()) == 1
