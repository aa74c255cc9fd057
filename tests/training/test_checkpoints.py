"""Checkpoints resume, or are refused in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training import small_run


def run(folder: Path, **changes: Any) -> Any:
    model = small_run.attach(every=2, num_heads=1, head_dim=4, feed_forward=0)
    settings = {"max_steps": 6, "save_steps": 3, "eval_steps": 3, "early_stopping_patience": 5} | changes
    return small_run.run(folder, model=model, **settings)


def test_a_resumed_run_says_so_and_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 131."""
    run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    capsys.readouterr()
    run(tmp_path, progress=True)
    lines = [line.split(" loss")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("training")]
    assert lines == ["training resumes at step 3 of 6", "training 4/6", "training 5/6", "training 6/6"]
