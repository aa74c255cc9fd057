"""Recipes run from Python, as a sweep does."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mmattn.recipes import run_recipe
from mmattn.storage.files import lock_folder

TRAIN = """\
import signal

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    out: str = "runs/toy"
    rate: float = 0.1
    interrupted: bool = False


def main(config):
    try:
        if config["interrupted"]:
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass  # it saves what it has
    return f"{config['out']} at {config['rate']}"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "config.yaml").write_text("rate: 0.5\n")
    return tmp_path / "config.yaml"


def test_it_returns_what_the_recipe_does(config: Path) -> None:
    assert run_recipe(config) == "runs/toy at 0.5"
    assert run_recipe(str(config), ["rate=1e-3", "out=there"]) == "there at 0.001"


def test_ctrl_c_ends_the_sweep_too(config: Path) -> None:
    """A recipe catches it to save what it has; what called it must not begin the next trial."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(config, ["interrupted=true"])
    assert signal.getsignal(signal.SIGINT) is handler


def test_in_a_thread(config: Path) -> None:
    """Where no signal arrives: a worker of Ray runs its trials in one."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_recipe, config, ["rate=2"]).result() == "runs/toy at 2.0"


def test_a_folder_has_one_run_at_once(config: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with lock_folder(tmp_path / "there"), pytest.raises(BlockingIOError, match="another process holds this folder"):
        run_recipe(config, ["out=there"])
    assert run_recipe(config, ["out=there"]) == "there at 0.5"
