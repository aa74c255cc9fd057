"""The sweeps of the page about them, run as scripts; killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmattn import training
from mmattn.storage.json_files import read_json
from tests.pages import BLOCK

ROOT = Path(__file__).resolve().parents[2]
KILLED = """\
import os, signal
from mmattn.training import checkpoints

sync = checkpoints.sync_folder

def killed(folder):
    sync(folder)
    if (folder / "step-00000010").exists():
        os.kill(os.getpid(), signal.SIGKILL)

checkpoints.sync_folder = killed
"""


def script(folder: Path, library: str, **changes: str) -> Path:
    """The first block of the page and the one of a library, as a file, with some words changed."""
    (folder / "assets").symlink_to(ROOT / "assets")
    begin, *others = [match["code"] for match in BLOCK.finditer((ROOT / "docs" / "sweeps.md").read_text("utf-8"))]
    (own,) = [code for code in others if library in code]
    code = f"{begin}\n{own}"
    for old, new in {"copy_recipe(": 'Path("mine").exists() or copy_recipe(', **changes}.items():
        assert old in code
        code = code.replace(old, new)
    (folder / "sweep.py").write_text(code, encoding="utf-8")
    return folder / "sweep.py"


def start(file: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"}
    words = [sys.executable, file.name]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=file.parent, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.mark.slow
def test_optuna_killed_and_started_again(tmp_path: Path) -> None:
    """The trial that was killed is resumed from its checkpoint, and the best one is that of the lowest loss."""
    optuna = pytest.importorskip("optuna")
    file = script(tmp_path, "optuna", **{'"progress=false"': '"progress=false", "optim.save_steps=5"'})
    (tmp_path / "killed.py").write_text(KILLED + file.read_text("utf-8"), encoding="utf-8")
    process, runs = start(tmp_path / "killed.py"), tmp_path / "runs" / "sweep"
    said, _ = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL, said
    (killed,) = runs.iterdir()
    assert training.last_step(killed / "checkpoints") == 10 and not (killed / "table.json").exists()
    first = training.read_metrics(killed / "metrics.jsonl")[0]
    process = start(file)
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    lines = training.read_metrics(killed / "metrics.jsonl")
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert lines[0] == first, "with its times: it was not learned again"
    study = optuna.load_study(study_name="rates", storage=f"sqlite:///{tmp_path}/sweep.db")
    done = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    assert len(done) == 3 == len(list(runs.iterdir()))
    losses = {trial.value for trial in done}
    assert losses == {training.read_run(run).lowest("eval_loss") for run in runs.iterdir()}
    assert study.best_value == min(losses) and str(study.best_params) in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_tune(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", exc_type=ImportError)
    process = start(script(tmp_path, "ray"))
    said, _ = process.communicate(timeout=580)
    assert process.returncode == 0, said
    runs = sorted((tmp_path / "runs" / "ray").iterdir())
    assert len(runs) == 2 and all((run / "table.json").is_file() for run in runs)
    best = min(runs, key=lambda run: training.read_run(run).lowest("eval_loss"))
    assert f"{{'rate': {training.read_run(best).settings['optim.learning_rate']}}}" in said
    assert read_json(best / "table.json")["rows"]
