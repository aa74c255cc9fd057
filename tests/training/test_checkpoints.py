"""Checkpoints resume, or are refused in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mmattn.errors import AdapterFileError
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.training.checkpoints import FORMAT
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


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, eval_steps=0, early_stopping_patience=0)
    file = tmp_path / "checkpoints" / "step-00000001" / "state.safetensors"
    tensors, about = read_tensors(file, FORMAT)
    write_tensors(file, tensors, {**about, "format_version": 2})
    with pytest.raises(AdapterFileError, match="format version 2, and this mmattn reads 1; update"):
        run(tmp_path, max_steps=1, eval_steps=0, early_stopping_patience=0)
