"""A script of this folder in a process of its own, which has no threads and may fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check(name: str, *arguments: str) -> None:
    """Run a script with these arguments; its exit status is 0."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tests.stress.{name}", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr
