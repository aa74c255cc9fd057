"""A passage that a host has read, and the file of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.adapter_config import check_tensors
from mmattn.errors import AdapterFileError
from mmattn.storage.json_files import making_sense, validated
from mmattn.storage.safetensors import read_tensors, write_tensors

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


def read_entries(
    path: str | PathLike[str], host: str, adapter: Any, mapped: bool, vocabulary: int | None = None
) -> list[Entry]:
    """Read what `write_entries` wrote.

    Args:
        path: of the file.
        host: fingerprint of the host that is to use them.
        adapter: its passage adapter.
        mapped: leave keys and values in the file.
        vocabulary: ids that the host knows; None where that is not known.

    Raises:
        AdapterFileError: the file is torn, changed or something else, another host has read the passages, or it holds
            what no host can have read.
    """
    with making_sense(path, "passages"):
        tables, metadata = read_tensors(path, FORMAT, mapped=mapped)
        if metadata.get("host") != host:
            raise AdapterFileError(
                f"the passages in {str(path)!r} were read by a host with other weights: take the host that read them, "
                "or read them again, PassageCache(model).add(…)"
            )
        has_windows = validated(f"has_windows in {str(path)!r}", bool, metadata.get("has_windows", False))
        _check_tables(path, tables, adapter, vocabulary)
        lengths = tables["lengths"].tolist()
        parts = {name: table.split(lengths) for name, table in tables.items() if name != "lengths"}
        entries = [
            Entry(
                tuple(parts["ids"][number].tolist()),
                {layer: parts[f"keys.{layer}"][number] for layer in adapter.layers},
                {layer: parts[f"values.{layer}"][number] for layer in adapter.layers},
                has_windows,
            )
            for number in range(len(lengths))
        ]
        if len({entry.ids for entry in entries}) != len(entries):
            raise AdapterFileError(f"{str(path)!r} holds a passage twice, and each is read once")
    return entries


def _check_tables(
    path: str | PathLike[str], tables: Mapping[str, Tensor], adapter: Any, vocabulary: int | None
) -> None:
    """Refuse tables that are not those of passages that this host can have read.

    Raises:
        AdapterFileError: they are not.
    """
    total = len(tables["ids"])
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "ids": ((total,), torch.int64),
        "lengths": ((tables["lengths"].numel(),), torch.int64),
    }
    for site in adapter.sites:
        kind = tables[f"keys.{site.layer}"].dtype
        widths = {"keys": site.heads.head_dim, "values": site.heads.value_dim or site.heads.head_dim}
        for part, width in widths.items():
            expected[f"{part}.{site.layer}"] = ((total, site.heads.num_kv_heads, width), kind)
        if not kind.is_floating_point or kind.itemsize == 1:
            raise AdapterFileError(f"the keys in {str(path)!r} are {kind}, in which no host computes them")
    check_tensors(expected, tables)
    lengths, ids = tables["lengths"], tables["ids"]
    if not len(lengths) or int(lengths.min()) < 1 or int(lengths.max()) > total or int(lengths.sum()) != total:
        raise AdapterFileError(f"the passages in {str(path)!r} are not as long as it says, of {total} tokens in all")
    if int(ids.min()) < 0 or (vocabulary is not None and int(ids.max()) >= vocabulary):
        raise AdapterFileError(
            f"{str(path)!r} has ids from {int(ids.min())} to {int(ids.max())}, and the vocabulary of this host has "
            f"{vocabulary}"
        )
