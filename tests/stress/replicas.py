"""Answers a second of one process and of two replicas.

    python -m tests.stress.replicas [SECONDS] [CLIENTS] [FOLDER]

An adapter that reads pictures, by default that of the recipe vqa on SmolLM2, is served with one thread a process, and
clients ask about pictures, two of three as streams. Prints a line for each server; exits with 1 if an answer is not
that of the pipeline.
"""

from __future__ import annotations

import subprocess
import sys
import time

from tests.serving.outcomes import Outcomes, captions
from tests.serving.processes import ROOT, serving

QUESTION = "What shape is in the image?"


def main(seconds: float = 30.0, clients: int = 32, folder: str = "assets/vqa") -> int:
    """Print a line for each server; 1 if an answer was wrong."""
    answers, wrong = captions(folder, QUESTION), False
    for options in ([], ["--replicas", "2"]):
        words = ["mmattn", "serve", folder, "--name", "adapter", *options]
        with serving(words, ROOT, 240, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as (_, url):
            with Outcomes(url, answers, clients, QUESTION) as load:
                time.sleep(10)  # every process is warm
                before, begin = load.counts["right"], time.monotonic()
                time.sleep(seconds)
                rate = (load.counts["right"] - before) / (time.monotonic() - begin)
            wrong |= set(load.counts) != {"right"}
        print(f"{' '.join(words)}: {rate:.1f} answers a second, {clients} clients; {dict(load.counts)}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3]), *sys.argv[3:4]))
