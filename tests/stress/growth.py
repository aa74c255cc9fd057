"""Use one host for long and see whether anything is left behind: tensors, hooks, memory of the process.

    python -m tests.stress.growth [GENERATES] [CHANGES]

Generates, each with a new memory; then as many changes of each kind as asked: an adapter attached and detached, and one
saved and loaded. Tensors and hooks are counted before and after, once everything has been used a few times; the
process is measured at the middle and at the end. Prints a line for each and exits with 1 if a tensor or a hook is left,
or if the process grew by more than 4 MB in a second half (one memory and its keys and values kept by each generate
would be 90 MB).
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import mmattn
from tests import tiny

SLOTS = 101
MOST = 4 << 20
FEW = 5


@dataclass(frozen=True)
class Left:
    """What one kind of work left behind: tensors, hooks, bytes of the process in its second half."""

    tensors: int
    hooks: int
    bytes: int


def live_tensors() -> int:
    """How many tensors there are in this process."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def hooks(host: nn.Module) -> int:
    """How many hooks of any kind there are on a host."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return sum(len(getattr(part, kind)) for part in host.modules() for kind in kinds)


def repeat(work: Callable[[int], object], count: int, host: nn.Module) -> Left:
    """What is left after so many calls that was not there after a few."""
    for number in range(FEW):
        work(-number)
    before, hooked, process = live_tensors(), hooks(host), psutil.Process()
    for number in range(count // 2):
        work(number)
    gc.collect()
    middle = process.memory_info().rss
    for number in range(count // 2, count):
        work(number)
    gc.collect()
    end = process.memory_info().rss  # before the counting, which takes room itself
    return Left(live_tensors() - before, hooks(host) - hooked, end - middle)


def generating(count: int) -> Left:
    """Generate again and again, each time with a memory never seen."""
    model = tiny.attach(tiny.make("llama"))
    ids = tiny.text(1)

    def work(number: int) -> None:
        model.generate(ids, memory=tiny.memory(1, m=SLOTS, seed=abs(number)), max_new_tokens=2, do_sample=False)

    return repeat(work, count, model.host)


def attaching(count: int) -> Left:
    """Attach an adapter, ask once, detach it."""
    host, ids, memory = tiny.make("llama"), tiny.text(1), tiny.memory(1)

    def work(number: int) -> None:
        model = tiny.attach(host)
        with torch.no_grad():
            model(ids, memory=memory)
        model.unload()

    return repeat(work, count, host)


def saving(count: int) -> Left:
    """Save an adapter, load it under another name beside the first, delete that one."""
    model: Any = tiny.attach(tiny.make("llama"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "adapter"

        def work(number: int) -> None:
            model.save_adapter(folder)
            mmattn.load(model, folder, "again")
            model.delete_adapter("again")

        left = repeat(work, count, model.host)
        assert len(list(folder.iterdir())) == 3
    return left


def main(generates: int = 10_000, changes: int = 1000) -> int:
    bad = 0
    works = [("generates", generating, generates), ("attached and detached", attaching, changes)]
    for name, work, count in [*works, ("saved and loaded", saving, changes)]:
        left = work(count)
        bad += left.tensors != 0 or left.hooks != 0 or left.bytes > MOST
        print(
            f"{count} {name}: {left.tensors:+d} tensors, {left.hooks:+d} hooks, "
            f"{left.bytes / 1024:+.0f} KB in the second half",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
