"""The command line called in this process, and as a process of its own that may be interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmattn.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
# A job in the background inherits a SIGINT that is ignored; what a terminal starts does not.
_PROGRAM = (
    "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from mmattn.cli.app import main\nmain(sys.argv[1:])\n"
)


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `mmattn WORDS`."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    """`mmattn WORDS` as a process in a folder."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def interrupt_at(process: subprocess.Popen[str], words: str) -> tuple[int, str]:
    """Send Ctrl-C when the process prints `words`: its exit code, and all that it printed."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if words in line:
            process.send_signal(signal.SIGINT)
            break
    else:
        pytest.fail(f"it never printed {words!r}: {printed}")
    rest, _ = process.communicate(timeout=120)
    return process.returncode, printed + rest
