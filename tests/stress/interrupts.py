"""Press Ctrl-C at many moments of `mmattn index build`, and look at what is there.

    python -m tests.stress.interrupts [MOMENTS]

The moments lie from the start of the process to 3.7 seconds later. What is there is nothing or whole, the exit code is
130 (0 where the command was faster, -2 before its first line: a shell shows 130 for it, too), and the same command
builds the index afterwards with nothing left beside it. Prints one line and exits with 1 on a failure.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mmattn import Index
from tests.cli.running import start
from tests.tiny_texts import save_encoder

ENTRIES = 300


def interrupted_builds(folder: Path, encoder: Path, moments: Sequence[float]) -> list[int]:
    """Interrupt a build after each of some seconds, and let the last one end."""
    (folder / "lines.txt").write_text("\n".join(f"the bluebell {number}" for number in range(ENTRIES)))
    words = ["index", "build", "lines.txt", "-o", "index", "--encoder", str(encoder)]
    codes = []
    for seconds in moments:
        process = start(folder, *words)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        codes.append(process.returncode)
        if (folder / "index").exists():
            assert len(Index.load(folder / "index")) == ENTRIES
            shutil.rmtree(folder / "index")
    last = start(folder, *words)
    printed, _ = last.communicate(timeout=120)
    assert last.returncode == 0, printed
    assert sorted(path.name for path in folder.iterdir()) == ["index", "lines.txt"]
    return codes


def main(moments: int = 20) -> int:
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(19)
        (folder := Path(place) / "work").mkdir()
        encoder = save_encoder(Path(place) / "encoder")
        try:
            codes = interrupted_builds(folder, encoder, [3.7 * i / max(1, moments - 1) for i in range(moments)])
        except AssertionError as error:
            print(f"not as promised: {error}")
            return 1
    print(f"{moments} interrupts: {codes.count(130)} left with 130; the last build is whole")
    return int(not set(codes) <= {130, -signal.SIGINT, 0})


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
