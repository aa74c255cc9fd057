"""Files of a bank and of passages: tables of keys and values with fingerprints of the weights that computed them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.adapter_config import Shapes, check_tensors
from mmattn.adapters.passages import PassageLayers
from mmattn.errors import AdapterFileError
from mmattn.kv_store.pages import Model, blank_tables, check_dtype, weights
from mmattn.storage.fingerprints import fingerprint
from mmattn.storage.json_files import making_sense, validated
from mmattn.storage.safetensors import DTYPES, NAMES, read_tensors, write_tensors

BANK = "mmattn-bank"
PASSAGES = "mmattn-passages"


# Banks -----------------------------------------------------------------------------------------------------------


def write_bank(
    path: str | PathLike[str],
    model: Model,
    names: Iterable[str],
    dtype: torch.dtype | None,
    tables: dict[str, Tensor],
) -> None:
    """Write the tables of a bank, the dtype of its pages, and the fingerprints of its adapters."""
    prints = {name: fingerprint(weights(model.adapter(name))) for name in names}
    about = {"adapters": prints, "dtype": None if dtype is None else NAMES[dtype]}
    write_tensors(path, tables, {"format": BANK, "mmattn_version": __version__, **about})


def read_bank(
    path: str | PathLike[str], model: Model, mapped: bool
) -> tuple[list[str], torch.dtype | None, dict[str, Tensor]]:
    """Return the names of the adapters of a bank, the dtype of its pages, and its tables.

    Raises AdapterFileError if the file is torn, changed or something else, or the pages are of another adapter.
    """
    with making_sense(path, "bank"):
        tables, metadata = read_tensors(path, BANK, mapped=mapped)
        names = _check_adapters(path, model, validated("adapters", dict[str, str], metadata.get("adapters")))
        dtype = metadata["dtype"] if metadata["dtype"] is None else DTYPES[metadata["dtype"]]
        check_dtype(dtype)
        _check_bank(model, names, dtype, {name: (tuple(table.shape), table.dtype) for name, table in tables.items()})
        if bool(tables["mask"][0].any()) or bool(tables["present"][0]):
            raise AdapterFileError(f"{str(path)!r} has an entry in the first row, which a bank leaves empty")
    return names, dtype, tables


def _check_adapters(path: str | PathLike[str], model: Model, prints: Mapping[str, str]) -> list[str]:
    """Return the names of the adapters in a file, checked against those of this host."""
    if not prints:
        raise AdapterFileError(f"cannot read {str(path)!r}: it does not name the adapters of its pages")
    for name, expected in prints.items():
        if name not in model.adapters:
            raise AdapterFileError(
                f"the bank in {str(path)!r} has pages of an adapter {name[:100]!r}, and this host has "
                f"{', '.join(map(repr, model.adapters))}: attach that adapter under this name, or build the bank again "
                "with model.bank(memory)"
            )
        if fingerprint(weights(model.adapter(name))) != expected:
            raise AdapterFileError(
                f"the pages in {str(path)!r} were computed with other weights than those adapter {name!r} has here: "
                "load that adapter, or build the bank again with model.bank(memory)"
            )
    return list(prints)


def _check_bank(model: Model, names: Iterable[str], dtype: torch.dtype | None, shapes: Shapes) -> None:
    """Compare the tables of a file with those of a bank for these adapters."""
    shape, kind = shapes.get("tokens", ((), torch.bool))
    if len(shape) != 3 or not all(shape) or not kind.is_floating_point:
        raise AdapterFileError(f"a bank has tokens (n + 1, m, e) in floating point, and the file {kind} {list(shape)}")
    for name in names:
        width = model.adapter(name).config.memory_dim
        if width != shape[2]:
            raise AdapterFileError(
                f"adapter {name!r} reads entries of width {width}, and the file's are {shape[2]} wide"
            )
    blank = blank_tables(model, names, dtype, torch.empty(0, *shape[1:], dtype=kind), 0)
    check_tensors({name: ((shape[0], *table.shape[1:]), table.dtype) for name, table in blank.items()}, shapes)


# Passages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """Ids of a passage, and its keys (m, g, k) and values (m, g, v) by layer, as at positions 0 to m - 1.

    `has_windows`: some layers attend to a limited number of tokens before.
    """

    ids: tuple[int, ...]
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    has_windows: bool = False

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(one.nbytes for part in (self.keys, self.values) for one in part.values())


def write_passages(path: str | PathLike[str], passages: Sequence[Passage], host: str) -> None:
    """Write passages to one file, with the fingerprint of their host."""
    if not passages:
        raise AdapterFileError(f"there are no passages to write to {str(path)!r}: add some first")
    tables = {
        "ids": torch.tensor([token for passage in passages for token in passage.ids]),
        "lengths": torch.tensor([len(passage.ids) for passage in passages]),
    }
    for layer in passages[0].keys:
        tables[f"keys.{layer}"] = torch.cat([passage.keys[layer] for passage in passages])
        tables[f"values.{layer}"] = torch.cat([passage.values[layer] for passage in passages])
    about = {"host": host, "has_windows": any(passage.has_windows for passage in passages)}
    write_tensors(Path(path), tables, {"format": PASSAGES, "mmattn_version": __version__, **about})


def read_passages(
    path: str | PathLike[str], host: str, adapter: PassageLayers, mapped: bool, vocab_size: int | None = None
) -> list[Passage]:
    """Read the passages that `write_passages` wrote for the host with this fingerprint.

    Raises AdapterFileError if the file is torn, changed or something else, another host has read the passages, or the
    file holds what no host can have read.
    """
    with making_sense(path, "passages"):
        tables, metadata = read_tensors(path, PASSAGES, mapped=mapped)
        if metadata.get("host") != host:
            raise AdapterFileError(
                f"the passages in {str(path)!r} were read by a host with other weights: take the host that read them, "
                "or read them again, PassageCache(model).add(…)"
            )
        has_windows = validated(f"has_windows in {str(path)!r}", bool, metadata.get("has_windows"))
        _check_passages(path, tables, adapter, vocab_size)
        lengths = tables["lengths"].tolist()
        parts = {name: table.split(lengths) for name, table in tables.items() if name != "lengths"}
        passages = [
            Passage(
                tuple(parts["ids"][number].tolist()),
                {layer: parts[f"keys.{layer}"][number] for layer in adapter.layers},
                {layer: parts[f"values.{layer}"][number] for layer in adapter.layers},
                has_windows,
            )
            for number in range(len(lengths))
        ]
        if len({passage.ids for passage in passages}) != len(passages):
            raise AdapterFileError(f"{str(path)!r} holds a passage twice, and each is read once")
    return passages


def _check_passages(path: Any, tables: Mapping[str, Tensor], adapter: PassageLayers, vocab_size: int | None) -> None:
    """Refuse tables of passages that this host cannot have read."""
    total = len(tables["ids"])
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "ids": ((total,), torch.int64),
        "lengths": ((tables["lengths"].numel(),), torch.int64),
    }
    for site in adapter.sites:
        kind = tables[f"keys.{site.layer}"].dtype
        assert site.heads is not None
        widths = {"keys": site.heads.head_dim, "values": site.heads.value_dim or site.heads.head_dim}
        for part, width in widths.items():
            expected[f"{part}.{site.layer}"] = ((total, site.heads.num_kv_heads, width), kind)
        if not kind.is_floating_point or kind.itemsize == 1:
            raise AdapterFileError(f"the keys in {str(path)!r} are {kind}, in which no host computes them")
    check_tensors(expected, tables)
    lengths, ids = tables["lengths"], tables["ids"]
    if not len(lengths) or int(lengths.min()) < 1 or int(lengths.max()) > total or int(lengths.sum()) != total:
        raise AdapterFileError(f"the passages in {str(path)!r} are not as long as it says, of {total} tokens in all")
    if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
        raise AdapterFileError(
            f"{str(path)!r} has ids from {int(ids.min())} to {int(ids.max())}, and the vocabulary of this host has "
            f"{vocab_size}"
        )
