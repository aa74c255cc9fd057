"""A bank to a file and back: whose pages they are, and whether the adapters of this host would make the same."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.file_format import Shapes, check_tensors
from mmattn.errors import AdapterFileError
from mmattn.hosts.bank.tables import blank_tables, weights
from mmattn.storage.fingerprints import fingerprint
from mmattn.storage.tensor_files import DTYPES, NAMES, read_header, read_tensors, write_tensors

FORMAT = "mmattn-bank"


def write_bank(
    path: str | PathLike[str],
    model: Any,
    names: Iterable[str],
    tables: dict[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Write the tables of a bank, the dtype asked for its pages, and whose they are."""
    prints = {name: fingerprint(weights(model.adapter(name))) for name in names}
    kept = None if dtype is None else NAMES[dtype]
    write_tensors(path, tables, {"format": FORMAT, "mmattn_version": __version__, "adapters": prints, "dtype": kept})


def read_bank(
    path: str | PathLike[str], model: Any, mapped: bool
) -> tuple[list[str], dict[str, Tensor], torch.dtype | None]:
    """The names of the adapters of a bank, its tables, and the dtype asked for its pages.

    Raises:
        AdapterFileError: the file is torn, changed or something else, or the pages are of another adapter.
    """
    shapes, metadata = read_header(path, FORMAT)
    names = check_adapters(path, model, metadata.get("adapters"))
    kept = metadata.get("dtype")
    dtype = DTYPES.get(str(kept))
    if kept is not None and (dtype is None or not dtype.is_floating_point):
        raise AdapterFileError(f"cannot read {str(path)!r}: its pages cannot be of dtype {kept!r}")
    check_tables(model, names, shapes, dtype)
    tables, again = read_tensors(path, FORMAT, check_finite=False, mapped=mapped)
    if again != metadata or {name: (tuple(x.shape), x.dtype) for name, x in tables.items()} != shapes:
        raise AdapterFileError(f"{str(path)!r} was replaced while it was read")
    return names, tables, dtype


def check_adapters(path: str | PathLike[str], model: Any, found: Any) -> list[str]:
    """The names of the adapters that made the pages in a file, if this host has the same ones.

    Raises:
        AdapterFileError: another one, by name.
    """
    if not isinstance(found, dict) or not found:
        raise AdapterFileError(f"cannot read {str(path)!r}: it does not say which adapters made its pages")
    for name, wanted in found.items():
        if name not in model.adapters:
            raise AdapterFileError(
                f"the bank in {str(path)!r} was made by an adapter {name[:100]!r}, and this host has "
                f"{', '.join(map(repr, model.adapters))}: attach that adapter under this name, or make the bank anew"
            )
        if fingerprint(weights(model.adapter(name))) != wanted:
            raise AdapterFileError(
                f"the bank in {str(path)!r} was made by other weights than those adapter {name!r} has here: load the "
                "adapter it was made with, or make the bank anew with model.bank(memory)"
            )
    return list(found)


def check_tables(model: Any, names: Iterable[str], shapes: Shapes, dtype: torch.dtype | None) -> None:
    """Compare the tables of a file with those that these adapters make.

    Raises:
        AdapterFileError: they differ.
    """
    shape, kind = shapes.get("tokens", ((), torch.bool))
    if len(shape) != 3 or not all(shape) or not kind.is_floating_point:
        raise AdapterFileError(f"a bank has tokens (n + 1, m, e) in floating point, and the file {kind} {list(shape)}")
    for name in names:
        width = model.adapter(name).config.memory_dim
        if width != shape[2]:
            raise AdapterFileError(
                f"adapter {name!r} reads entries of width {width}, and the file's are {shape[2]} wide"
            )
    blank = blank_tables(model, names, torch.empty(0, *shape[1:], dtype=kind), 0, dtype)
    check_tensors({name: ((shape[0], *table.shape[1:]), table.dtype) for name, table in blank.items()}, shapes)
