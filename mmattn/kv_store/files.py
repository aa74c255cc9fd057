"""The file of a bank: its tables, and fingerprints of the adapters whose pages are in them."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.adapter_config import Shapes, check_tensors
from mmattn.errors import AdapterFileError
from mmattn.kv_store.page_formats import PageFormat, describe_format, described_format
from mmattn.kv_store.tables import blank_tables, weights
from mmattn.storage.fingerprints import fingerprint
from mmattn.storage.json_files import making_sense
from mmattn.storage.safetensors import read_header, read_tensors, write_tensors

FORMAT = "mmattn-bank"


def write_bank(
    path: str | PathLike[str],
    model: Any,
    names: Iterable[str],
    form: PageFormat,
    tables: dict[str, Tensor],
) -> None:
    """Write the tables of a bank, the format of its pages, and the fingerprints of its adapters.

    Args:
        path: the file.
        model: the adapted model.
        names: of the adapters that have pages.
        form: of the pages.
        tables: by name.
    """
    prints = {name: fingerprint(weights(model.adapter(name))) for name in names}
    metadata = {"format": FORMAT, "mmattn_version": __version__, "adapters": prints} | describe_format(form)
    write_tensors(path, tables, metadata)


def read_bank(path: str | PathLike[str], model: Any, mapped: bool) -> tuple[list[str], PageFormat, dict[str, Tensor]]:
    """The names of the adapters of a bank, the format of its pages, and its tables.

    Args:
        path: the file.
        model: the adapted model.
        mapped: leave the tables in the file.

    Raises:
        AdapterFileError: the file is torn, changed or something else, or the pages are of another adapter.
    """
    with making_sense(path, "bank"):
        shapes, metadata = read_header(path, FORMAT)
        names = check_adapters(path, model, metadata.get("adapters"))
        form = described_format(metadata)
        check_tables(model, names, form, shapes)
        tables, again = read_tensors(path, FORMAT, mapped=mapped)
        if again != metadata or {name: (tuple(x.shape), x.dtype) for name, x in tables.items()} != shapes:
            raise AdapterFileError(f"{str(path)!r} was replaced while it was read")
        if bool(tables["mask"][0].any()) or int(tables["edition"].min()) < 0:
            raise AdapterFileError(f"{str(path)!r} has an entry in the first row, which a bank leaves empty")
    return names, form, tables


def check_adapters(path: str | PathLike[str], model: Any, prints: Any) -> list[str]:
    """The names of the adapters that the pages in a file are of, checked against those of this host.

    Args:
        path: the file.
        model: the adapted model.
        prints: the fingerprints in the file, by name.

    Raises:
        AdapterFileError: this host has other ones, or the file names none.
    """
    if not isinstance(prints, dict) or not prints:
        raise AdapterFileError(f"cannot read {str(path)!r}: it does not name the adapters of its pages")
    for name, wanted in prints.items():
        if name not in model.adapters:
            raise AdapterFileError(
                f"the bank in {str(path)!r} has pages of an adapter {name[:100]!r}, and this host has "
                f"{', '.join(map(repr, model.adapters))}: attach that adapter under this name, or build the bank again "
                "with model.bank(memory)"
            )
        if fingerprint(weights(model.adapter(name))) != wanted:
            raise AdapterFileError(
                f"the pages of the bank in {str(path)!r} were computed with other weights than those adapter {name!r} "
                "has here: load the adapter it was built with, or build the bank again with model.bank(memory)"
            )
    return list(prints)


def check_tables(model: Any, names: Iterable[str], form: PageFormat, shapes: Shapes) -> None:
    """Compare the tables of a file with those of a bank for these adapters.

    Args:
        model: the adapted model.
        names: of the adapters.
        form: of the pages.
        shapes: the shape and dtype of each table in the file.

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
    blank = blank_tables(model, names, form, torch.empty(0, *shape[1:], dtype=kind), 0)
    check_tensors({name: ((shape[0], *table.shape[1:]), table.dtype) for name, table in blank.items()}, shapes)
