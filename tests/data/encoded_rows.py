"""Rows and encoded datasets for tests: pictures of one colour, a tiny encoder, and a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from mmattn import training
from mmattn.encoders import ImageEncoder, ImageProcessor

ROOT = Path(__file__).resolve().parents[2]
EYE_DIM, EYE_SLOTS = 5, 6
JOB = """
import sys
from tests.data.encoded_rows import Eye, encode_captions
folder, out, log, kill = sys.argv[1:5]
encode_captions(folder, out, Eye(log=log, kill=int(kill)))
"""


class Eye(ImageEncoder):
    """Six patches of a picture; writes down what it encodes, and can end its process as `kill -9` does.

    Args:
        log: a file that gets a line for each batch: the number of pictures.
        kill: the batch in which the process ends; 0 for none.
        seed: of the weights.
        pooled: one slot for each picture.
    """

    def __init__(self, log: str | Path | None = None, kill: int = 0, seed: int = 0, pooled: bool = False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = nn.Conv2d(3, EYE_DIM, 2, stride=2)
        super().__init__(network, ImageProcessor(size=(4, 6), resize="squash"), pooled=pooled)
        self.log, self.kill, self.calls = log, kill, 0

    def forward(self, images: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        found = super().forward(images, **options)
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{len(images)}\n")
        return found


def picture(path: Path, colour: int = 0) -> Path:
    """A picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (7, 5), (colour % 251, 3 * colour % 256, 50)).save(path)
    return path


def captions(folder: Path, colours: list[int]) -> Path:
    """A folder of pictures with captions; the same colour is the same content in another file."""
    for number, colour in enumerate(colours):
        picture(folder / f"{number}.png", colour)
    lines = [{"file_name": f"{n}.png", "text": f"picture {n}" + " ü" * (n % 5)} for n in range(len(colours))]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def encode_captions(folder: str | Path, out: str | Path, eye: Eye, **options: Any) -> Any:
    """An encoded folder of pictures as tensors, with four rows in a shard."""
    given: dict[str, Any] = {"rows_per_shard": 4, "batch_size": 2, "strict": False}
    rows = training.read_rows(folder, split="train")
    return training.encode_dataset(rows, out, pictures=eye, **{**given, **options}).with_format("torch")


def start(folder: Path, out: Path, log: Path, kill: int = 0) -> subprocess.CompletedProcess[str]:
    """`encode_captions` in a process of its own."""
    words = [sys.executable, "-c", JOB, str(folder), str(out), str(log), str(kill)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=280)


def encoded(log: Path) -> int:
    """Pictures that were encoded, according to a log."""
    return sum(map(int, log.read_text().split()))
