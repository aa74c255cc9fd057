"""Cached hidden states in whole runs: nothing that is learned depends on what was in the cache."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.training import small_run

SETTINGS: dict[str, Any] = {"every": None, "layers": [1, 2]}


def run(folder: Path, states: Path, **settings: Any) -> str:
    """A run of `train` whose states are cached; the sha256 of its adapter."""
    small_run.run(folder, hidden_states=states, adapter=SETTINGS, **settings)
    return small_run.sha256(folder)


def test_cold_and_warm_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """Invariant 76: what was in the cache changes nothing that is learned."""
    cold = run(tmp_path / "a", tmp_path / "states")
    assert run(tmp_path / "b", tmp_path / "states") == cold
    files = sorted((tmp_path / "states").rglob("*.safetensors"))
    assert run(tmp_path / "c", tmp_path / "states", max_steps=3) != cold
    assert sorted((tmp_path / "states").rglob("*.safetensors")) == files, "nothing was computed again"


@pytest.mark.slow
def test_killed_and_taken_up_it_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """Invariant 76: killed while nothing was on the disk, and while all was; the whole run had another cache."""
    want = run(tmp_path / "whole", tmp_path / "others")
    given = {"hidden_states": str(tmp_path / "states"), "adapter": SETTINGS}
    for kill in ({"at_loss": 10}, {"at_save": 2}):
        found = small_run.start(tmp_path / "run", kill=kill, **given)
        assert found.returncode == -signal.SIGKILL, found.stderr
    assert run(tmp_path / "run", tmp_path / "states") == want
