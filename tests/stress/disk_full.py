"""Save an adapter over an older one on a disk with too little room, for every amount of room there can be.

    python -m tests.stress.disk_full [STEPS]

The disk is a tmpfs that is mounted for this, which needs root; it has room for the old adapter and 0, 1, 2 … pages,
until a save succeeds, or for STEPS amounts. After every save that fails the old files are there byte for byte and
nothing else is. Prints one line and exits with 1 on a failure.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mmattn.adapters.files import load_folder
from tests import tiny
from tests.adapters.adapter_folders import contents

PAGE = os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[int | None], None]]:
    """A tmpfs at `folder`, and a function that leaves room for so many bytes more on it (None: enough)."""

    def mount(size: int | None, *more: str) -> None:
        words = ["mount", "-t", "tmpfs", "-o", ",".join([*more, f"size={1 << 26 if size is None else size}"])]
        found = subprocess.run([*words, "tmpfs", str(folder)], capture_output=True, text=True)
        if found.returncode:
            raise OSError(found.stderr.strip())

    def leave(room: int | None) -> None:
        disk = os.statvfs(folder)
        mount(None if room is None else (disk.f_blocks - disk.f_bfree) * disk.f_frsize + room, "remount")

    mount(None)
    try:
        yield leave
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: Callable[[int | None], None], steps: int) -> tuple[int, int]:
    """How many saves failed with too little room, and how many of those did harm."""
    model = tiny.attach(tiny.make("llama"))
    model.save_adapter(folder / "adapter", encoder="old")
    old, failed, harm = contents(folder), 0, 0
    with torch.no_grad():
        for parameter in model.adapters.parameters():
            parameter.add_(1)
    for step in range(steps):
        leave(step * PAGE)
        try:
            model.save_adapter(folder / "adapter", encoder="new")
            break
        except OSError:
            failed += 1
        finally:
            leave(None)
        harm += contents(folder) != old
    else:
        model.save_adapter(folder / "adapter", encoder="new")
    harm += load_folder(folder / "adapter")[0]["encoder"] != "new"
    return failed, harm


def main(steps: int = 1000) -> int:
    with tempfile.TemporaryDirectory() as place, small_disk(Path(place)) as leave:
        failed, harm = fill(Path(place), leave, steps)
    print(f"a tmpfs: {failed} saves with too little room, {harm} did harm")
    return int(harm > 0 or failed == 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
