"""Processes that read passages into a folder which others use, too.

python -m tests.kv_store.passage_process FOLDER share SEED    # one of several: passages that it read, a digest of all
python -m tests.kv_store.passage_process FOLDER kill KILLS    # its children are killed: kills, lost, damaged, written
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mmattn
from tests import tiny

COUNT = 23


def passage(number: int) -> list[int]:
    """The ids of a passage, different for each number."""
    return [number % 97, number // 97 % 97, *(number % 89 for _ in range(number % 11))]


def open_cache(folder: Path) -> tuple[Any, mmattn.hosts.PassageCache, list[int]]:
    """A tiny host, its cache without room in memory, and a list of how many passages each of its calls reads."""
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())
    passages, read = mmattn.hosts.PassageCache(model, folder=folder, max_bytes=0), list[int]()
    model.host.register_forward_pre_hook(lambda *given: read.append(len(given[2]["input_ids"])), with_kwargs=True)
    return model, passages, read


def share(folder: Path, seed: int) -> None:
    """Read passages in an order of its own, one by one, while others read them."""
    model, passages, read = open_cache(folder)
    order = list(range(COUNT))
    random.Random(seed).shuffle(order)
    numbers = {number: passages.add([passage(number)], progress=False)[0] for number in order}
    count = sum(read)
    slots = passages.select([[numbers[number] for number in range(COUNT)]]).slots(model.adapter("default"))
    assert sum(read) == count, "a file was damaged"
    print(count, hashlib.sha256(b"".join(one.numpy().tobytes() for one in slots.tensors())).hexdigest())


def kill(folder: Path, kills: int) -> None:
    """Kill children that read passages, and look after each kill for every passage that one had read."""
    draw, lost, damaged, written = random.Random(0), 0, 0, 0
    for turn in range(kills):
        log, first = folder / f"{turn}.log", turn * 400
        child = os.fork()
        if not child:
            _, passages, _ = open_cache(folder)
            with open(log, "w") as file:
                for number in range(first, first + 9000):  # more than it has time for
                    passages.add([passage(number)], progress=False)
                    print(number, file=file, flush=True)
            os._exit(1)  # not killed in time
        while not log.exists():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.01, 0.3))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the process did not live until it was killed"
        done = [int(line) for line in log.read_text().split("\n")[:-1]]
        model, passages, read = open_cache(folder)
        numbers = passages.add([passage(number) for number in done], progress=False)
        lost, written = lost + sum(read), written + len(done)
        files = set(folder.glob("*/*.safetensors"))  # that of a passage not yet returned, too
        more = passages.add([passage(number) for number in range(first, first + len(done) + 2)], progress=False)
        read.clear()
        passages.select([numbers + more]).slots(model.adapter("default"))
        damaged += sum(read) + len(files - set(folder.glob("*/*.safetensors")))
    print(kills, lost, damaged, written)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"share": share, "kill": kill}[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3]))
