"""Checkpoints of every format that was ever written resume, or are refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmattn.errors import AdapterFileError
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.training.checkpoints import FORMAT, load_checkpoint
from tests.tiny import assert_close
from tests.training import small_run

GOLDEN = Path(__file__).parent / "golden" / "1"
"""Made by version 1, which called the settings steps, lr, …: six steps, of which every third has a checkpoint."""


def run(folder: Path, **changes: Any) -> Any:
    model = small_run.attach(every=2, num_heads=1, head_dim=4, feed_forward=0)
    settings = {"max_steps": 6, "save_steps": 3, "eval_steps": 3, "early_stopping_patience": 5} | changes
    return small_run.run(folder, model=model, **settings)


def test_a_run_of_the_first_format_resumes(tmp_path: Path) -> None:
    """From its third step, and it ends where that version ended, with metrics under today's names."""
    shutil.copytree(GOLDEN / "checkpoints" / "step-00000003", tmp_path / "checkpoints" / "step-00000003")
    shutil.copy(GOLDEN / "metrics.jsonl", tmp_path)
    done, _ = run(tmp_path)
    assert (done.resumed_from_step, done.global_step) == (3, 6)
    want, before = load_checkpoint(GOLDEN / "checkpoints" / "step-00000006")
    got, now = load_checkpoint(tmp_path / "checkpoints" / "step-00000006")
    assert set(got) == set(want) and any(name.startswith("best.") for name in want)
    for name, value in want.items():
        assert_close(got[name], value, 1e-4)
    assert set(now["run"]) == set(before["run"]) and set(now["at"]) == set(before["at"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    given = [json.loads(line) for line in (GOLDEN / "metrics.jsonl").read_text().splitlines()]
    for new, old in (("learning_rate", "lr"), ("grad_norm", "gradient_norm"), ("eval_loss", "held_out_loss")):
        assert [one.get(new, 0.0) for one in lines] == pytest.approx([one.get(old, 0.0) for one in given], rel=1e-4)


def test_a_resumed_run_says_so_and_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 131."""
    shutil.copytree(GOLDEN / "checkpoints" / "step-00000003", tmp_path / "checkpoints" / "step-00000003")
    shutil.copy(GOLDEN / "metrics.jsonl", tmp_path)
    run(tmp_path, progress=True)
    lines = [line.split(" loss")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("training")]
    assert lines == ["training resumes at step 3 of 6", "training 4/6", "training 5/6", "training 6/6"]


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, eval_steps=0, early_stopping_patience=0)
    file = tmp_path / "checkpoints" / "step-00000001" / "state.safetensors"
    tensors, about = read_tensors(file, FORMAT)
    write_tensors(file, tensors, {**about, "version": 3})
    with pytest.raises(AdapterFileError, match="format version 3 and this mmattn reads up to 2: update mmattn"):
        run(tmp_path, max_steps=1, eval_steps=0, early_stopping_patience=0)
