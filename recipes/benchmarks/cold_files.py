"""Files read as if for the first time: what the system has cached of them is dropped before, and looked for after."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

_LOOKED_AT = 64


def drop(files: Sequence[Path]) -> None:
    """Have the system forget the content of files (POSIX_FADV_DONTNEED)."""
    os.sync()
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cached(files: Sequence[Path]) -> float:
    """The share of some places in the files that is in memory: read only if nothing has to be waited for."""
    found, looked = 0, 0
    for file in files:
        handle, size = os.open(file, os.O_RDONLY), file.stat().st_size
        try:
            for place in range(_LOOKED_AT):
                looked += 1
                with contextlib.suppress(BlockingIOError):
                    found += os.preadv(handle, [bytearray(1)], size * place // _LOOKED_AT, os.RWF_NOWAIT)
        finally:
            os.close(handle)
    return found / looked


def dd(files: Sequence[Path]) -> None:
    """Read files with dd, sixteen megabytes at a time."""
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M"], stderr=subprocess.DEVNULL, check=True)


def resident() -> float:
    """Megabytes of this process that are in memory and no part of a file."""
    values = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(values["RssAnon"].split()[0]) / 1024
