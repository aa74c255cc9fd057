"""What the scripts over stores share: an empty place for each kind, and vectors that are known again."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.retrieval import databases

STORES = ("folder", "pgvector", "lancedb")
WIDTH = 31


@contextlib.contextmanager
def empty_place(store: str) -> Iterator[str]:
    """An address where nothing is yet: of a server that ends with the block, or in a folder that goes with it."""
    if store == "pgvector":
        with databases.postgres() as address:
            yield address
        return
    with tempfile.TemporaryDirectory() as place:
        schemes = {"folder": "", "lancedb": "lance:"}
        yield f"{schemes[store]}{Path(place) / 'index'}"


def vector_of(number: int) -> Tensor:
    """(1, e), another for each number, the same in every process."""
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(number))
