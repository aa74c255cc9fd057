"""Kill a training at random moments, three times a run, and see whether it ends where the uninterrupted one does.

    python -m tests.stress.kills_in_training [RUNS]

A run is `tests/training/small_run.py` in a process of its own: nine steps in two micro-batches with dropout, averaged
weights and held-out losses. It is killed with signal 9 while a loss is computed (in either micro-batch) or while a
checkpoint is written, and started again with the same command. Prints one line for each run and exits with 1 if one
differs.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
from pathlib import Path

from mmattn import training
from tests.training import small_run


def main(runs: int) -> int:
    chance, wrong = random.Random(0), 0
    with tempfile.TemporaryDirectory() as folder:
        small_run.start(Path(folder) / "whole")
        want = small_run.sha256(Path(folder) / "whole")
        for number in range(runs):
            place, kills = Path(folder) / str(number), []
            while len(kills) < 3:
                # Of nine steps in two micro-batches, and of five checkpoints, those that are left.
                step = training.last_step(place / "checkpoints")
                kill = {"at_loss": chance.randint(1, 2 * (9 - step))}
                if chance.random() < 0.4:
                    kill = {"at_save": chance.randint(1, sum(save > step for save in (2, 4, 6, 8, 9)))}
                found = small_run.start(place, kill=kill)
                assert found.returncode == -signal.SIGKILL, found.stderr
                kills.append(kill)
            found = small_run.start(place)
            same = found.returncode == 0 and small_run.sha256(place) == want
            wrong += not same
            ended = "equal" if same else f"DIFFERENT {found.stderr[-300:]}"
            print(f"run {number}: killed {kills}, {ended}", flush=True)
    print(f"{runs} runs, {wrong} different")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
