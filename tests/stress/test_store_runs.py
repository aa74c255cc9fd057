"""The scripts of stores in training, in short: with every run of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress import throttled_reading

ROOT = Path(__file__).resolve().parents[2]


def test_kills_in_encoding() -> None:
    """Invariant 109, in a process of its own, which starts others by fork."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.stress.kills_in_encoding", "9"]
    found = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_throttled_reader(capsys: pytest.CaptureFixture[str]) -> None:
    """So few steps, beside other tests, may wait a little longer; those that read nothing ahead wait much longer."""
    assert throttled_reading.main(30, 0.1) == 0, capsys.readouterr().out
