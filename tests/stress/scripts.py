"""Scripts of this folder in processes of their own, and children that are killed while they work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
FORKS = """
import os, sys
for line in sys.stdin:
    child = os.fork()
    if not child:
        work(*line.split())
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def check(name: str, *arguments: str) -> None:
    """Run a script with these arguments; its exit status is 0."""
    command = [sys.executable, "-m", f"tests.stress.{name}", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, cwd=ROOT, timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr


class Children:
    """A process without threads that forks a child for each call of the function `work` in its code."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code + FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
        )

    def killed(self, arguments: str, wait: Callable[[int], object]) -> bool:
        """Call `work`, and kill it when `wait(process id)` returns; False if it had ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{arguments}\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        try:
            wait(child)
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        ended = int(self.process.stdout.readline())
        if ended not in (0, signal.SIGKILL):
            raise RuntimeError(f"the process ended with {ended}, and not by the kill")
        return ended == signal.SIGKILL

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()
