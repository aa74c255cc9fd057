"""A passage that a host has read, and the file of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.errors import AdapterFileError
from mmattn.storage.tensor_files import read_tensors, write_tensors

FORMAT = "mmattn-passages"


@dataclass(frozen=True)
class Entry:
    """A passage and what a host computed of it.

    Args:
        ids: of its tokens.
        keys: by layer (m, g, k), turned as at positions 0 to m - 1.
        values: by layer (m, g, v).
        has_windows: some layers see back over a limited number of tokens.
    """

    ids: tuple[int, ...]
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    has_windows: bool = False

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(one.nbytes for part in (self.keys, self.values) for one in part.values())


def write_entries(path: str | PathLike[str], entries: Sequence[Entry], host: str) -> None:
    """Write passages to one file.

    Args:
        path: of the file.
        entries: the passages.
        host: fingerprint of what has read them.

    Raises:
        AdapterFileError: there are none.
    """
    if not entries:
        raise AdapterFileError(f"there are no passages to write to {str(path)!r}: add some first")
    tables = {
        "ids": torch.tensor([one for entry in entries for one in entry.ids]),
        "lengths": torch.tensor([len(entry.ids) for entry in entries]),
    }
    for layer in entries[0].keys:
        tables[f"keys.{layer}"] = torch.cat([entry.keys[layer] for entry in entries])
        tables[f"values.{layer}"] = torch.cat([entry.values[layer] for entry in entries])
    metadata = {
        "format": FORMAT,
        "mmattn_version": __version__,
        "host": host,
        "has_windows": any(entry.has_windows for entry in entries),
    }
    write_tensors(Path(path), tables, metadata)


def read_entries(path: str | PathLike[str], host: str, adapter: Any, mapped: bool) -> list[Entry]:
    """Read what `write_entries` wrote.

    Args:
        path: of the file.
        host: fingerprint of the host that is to use them.
        adapter: its passage adapter.
        mapped: leave keys and values in the file.

    Raises:
        AdapterFileError: the file is torn, changed or something else, or another host has read the passages.
    """
    tables, metadata = read_tensors(path, FORMAT, check_finite=False, mapped=mapped)
    if metadata.get("host") != host:
        raise AdapterFileError(
            f"the passages in {str(path)!r} were read by a host with other weights: take the host that read them, or "
            "read them again, PassageCache(model).add(…)"
        )
    wanted = {"ids", "lengths", *(f"{part}.{layer}" for part in ("keys", "values") for layer in adapter.layers)}
    lengths = tables.get("lengths", torch.zeros(0)).tolist()
    total = sum(lengths)
    if set(tables) != wanted or any(len(table) != total for name, table in tables.items() if name != "lengths"):
        raise AdapterFileError(f"{str(path)!r} holds no passages of the layers of this host")
    ids, ends = tables["ids"].tolist(), torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [
        Entry(
            tuple(ids[start:stop]),
            {layer: tables[f"keys.{layer}"][start:stop] for layer in adapter.layers},
            {layer: tables[f"values.{layer}"][start:stop] for layer in adapter.layers},
            has_windows=bool(metadata.get("has_windows")),
        )
        for start, stop in pairwise(ends)
    ]
