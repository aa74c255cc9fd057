"""Trackers of accelerate: what a real run gave them, read back with their own readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmattn import training
from mmattn.errors import ConfigError
from mmattn.recipes import find_recipe, load_recipe
from tests.training import tracker_files as trackers

FLORA = Path(__file__).parents[2] / "assets" / "flora"


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


def run(folder: Path, *names: str) -> Path:
    """A run of the recipe with its control, in the folder `run`."""
    main: Any = load_recipe(find_recipe("finetune").folder, "train").main
    return main(
        {
            "out": str(folder / "run"),
            "progress": False,
            "device": "cpu",
            "trackers": list(names),
            "data": {"path": str(FLORA), "held_out": 2, "cache": str(folder / "cache")},
            "adapter": {"every": 3, "num_heads": 2, "head_dim": 16},
            "optim": {"max_steps": 4, "batch_size": 3, "warmup_steps": 1, "save_steps": 2, "logging_steps": 2},
            "eval": {"eval_steps": 2, "controls": True},
            "caption": {"max_new_tokens": 5},
        }
    )


def check_metrics(found: dict[str, dict[int, float]], folder: Path) -> None:
    """Every number of both trainings' metrics is there, at its step."""
    for prefix, name in (("adapter", "metrics"), ("lora", "metrics_lora")):
        lines = training.read_metrics(folder / f"{name}.jsonl")
        assert [line["step"] for line in lines] == [2, 4]
        for key in set(lines[-1]) - {"step"}:
            wanted = {line["step"]: line[key] for line in lines}
            assert found[f"{prefix}/{key}"] == pytest.approx(wanted, rel=1e-5, abs=1e-7), key


def test_tensorboard(tmp_path: Path) -> None:
    out = run(tmp_path, "tensorboard")
    found = trackers.tensorboard(out / "tensorboard")
    check_metrics(found["metrics"], out)
    assert found["settings"]["optim.max_steps"] == 4 and found["settings"]["recipe"] == "finetune"
    assert "adapter, its own memory" in found["texts"]["table/text_summary"]
    width, height = found["pictures"]["loss"]
    assert height > width > 100


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    out = run(tmp_path, "wandb")
    found = trackers.weights_and_biases(out)
    check_metrics(found["metrics"], out)
    assert found["settings"]["optim.max_steps"] == 4 and found["settings"]["eval.controls"] is True
    names = [row[0] for row in found["tables"]["table"]["data"]]
    assert found["tables"]["table"]["columns"] == ["name", "loss", "parameters", "seconds"]
    assert names == ["LoRA, text only", "adapter, its own memory", "adapter, shuffled memory", "adapter, no memory"]
    assert found["pictures"]["loss"]["height"] > found["pictures"]["loss"]["width"] > 100


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    out = run(tmp_path, "mlflow")
    found = trackers.mlflow((tmp_path / "mlruns").as_uri())
    check_metrics(found["metrics"], out)
    assert found["settings"]["optim.max_steps"] == "4" and found["names"] == ["run"]
    assert {"table.json", "table.md", "loss.png"} <= set(found["files"])


def test_a_finished_run_begins_nothing_in_a_tracker(tmp_path: Path) -> None:
    out = run(tmp_path, "tensorboard")
    before = sorted((out / "tensorboard").rglob("*"))
    run(tmp_path, "tensorboard")
    assert sorted((out / "tensorboard").rglob("*")) == before


def resumed(folder: Path, *names: str) -> None:
    """Steps 1 to 4, of which 3 and 4 come again after a resume from step 2, with other figures."""
    for first, figure in ((0, 1.0), (2, 2.0)):
        settings = {"recipe": "finetune", "optim": {"save_steps": first}}
        accelerator = training.make_accelerator(
            folder, device="cpu", trackers=names, settings=settings, resumed_step=first
        )
        for step in range(first + 1, 5):
            training.log_to_trackers(accelerator, "adapter", step, {"loss": figure, "word": "left out"})
        training.end_training(accelerator)


def test_a_resumed_run_goes_on_in_tensorboard(tmp_path: Path) -> None:
    """What was logged after the checkpoint is not there twice."""
    resumed(tmp_path, "tensorboard")
    found = trackers.tensorboard(tmp_path / "tensorboard")
    assert found["metrics"] == {"adapter/loss": {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}}
    assert found["settings"]["optim.save_steps"] == 0, "those it began with"


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_others(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    resumed(tmp_path, "wandb", "mlflow")
    found = trackers.weights_and_biases(tmp_path)
    assert len(found["ids"]) == 2 and len(set(found["ids"])) == 1
    assert found["metrics"]["adapter/loss"] == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    kept = trackers.mlflow((tmp_path / "mlruns").as_uri())
    assert len(kept["ids"]) == 1 and kept["metrics"]["adapter/loss"] == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    assert kept["settings"]["optim.save_steps"] == "0"


def test_one_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tracker 'comet_ml' is not installed"):
        training.make_accelerator(tmp_path, device="cpu", trackers=("comet_ml",))
