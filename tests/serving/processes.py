"""`mmattn serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def serving(words: list[str], folder: Path, seconds: float, **options: Any) -> Iterator[tuple[Any, str]]:
    """Yield a server that answers, and its address; `words` is a command line, `mmattn` first, without a port."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", *words, "--port", str(port)]
    process = subprocess.Popen(words, cwd=folder, env=env, **options)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < end, "it does not start"
            time.sleep(0.2)
        yield process, url
    finally:
        process.kill()
        process.communicate()
