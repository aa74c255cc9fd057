"""Kill a process that saves an adapter again and again, and look at the folder after each kill.

    python -m tests.stress.kills_in_save [KILLS]

The kill (signal 9) comes 10 to 150 milliseconds after the process began, or after its first save. The folder must then
hold one of its saves, whole: every value, and the encoder's name in the config, tell which. Prints one line and exits
with 1 if a folder is torn.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mmattn.adapters.files import load_folder
from mmattn.errors import MmattnError
from tests import tiny

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


def save(model: Any, folder: Path, version: int) -> None:
    """Save an adapter whose every value is its version."""
    with torch.no_grad():
        for parameter in model.adapters.parameters():
            parameter.fill_(version)
    model.save_adapter(folder, encoder=f"v{version}")


def version_of(folder: Path) -> int:
    """Which save a folder holds."""
    config, tensors = load_folder(folder)
    (version,) = {float(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}
    if config["encoder"] != f"v{version:.0f}":
        raise ValueError(f"the values are of save {version}, and the config is of {config['encoder']}")
    return int(version)


def kill_one(model: Any, folder: Path, first: int, seconds: float, wait: bool) -> None:
    """Save `first` and later ones in a process of its own, and kill it; with `wait` not before `first` is there."""
    child = os.fork()
    if not child:
        while True:
            save(model, folder, first)
            first += 1
    while wait and version_of(folder) < first:
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status == signal.SIGKILL, "the process did not live until it was killed"


def main(kills: int = 200) -> int:
    chance, torn, moved, last = random.Random(0), 0, 0, 0
    model = tiny.attach(tiny.make("llama"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "adapter"
        save(model, folder, 0)
        for kill in range(kills):
            kill_one(model, folder, last + 1, chance.uniform(0.010, 0.150), wait=kill % 2 == 1)
            try:
                now = version_of(folder)
                if now < last:
                    raise ValueError(f"save {last} was there and is gone; now it is {now}")
                moved, last = moved + (now > last), now
            except (MmattnError, ValueError) as error:
                torn += 1
                print(f"torn: {error}", file=sys.stderr)
                save(model, folder, last)
        save(model, folder, last + 1)
        left = sorted(os.listdir(folder))
        whole = version_of(folder) == last + 1 and left == FILES
    print(f"{kills} kills: {torn} torn, {moved} after a new save; at the end {'whole' if whole else left}")
    return int(torn > 0 or not whole)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
