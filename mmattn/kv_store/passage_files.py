"""Files of passages: `PassageCache.save`, and one file for each passage of a `PassageFolder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.files import check_tensors
from mmattn.adapters.passages import PassageLayers
from mmattn.errors import AdapterFileError
from mmattn.kv_store.passage_selection import Passage, as_one
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import read_tensors, write_tensors

PASSAGES = "mmattn-passages"


def write_passages(
    path: str | PathLike[str],
    passages: Sequence[Passage],
    host: str,
    adapter: PassageLayers,
    prefix: Sequence[Passage] = (),
) -> None:
    """Write the prefix and the passages to one file, with the fingerprint of their host."""
    if not passages:
        raise AdapterFileError(f"there are no passages to write to {str(path)!r}: add some first")
    passages = [*prefix, *passages]
    tables = {
        "ids": torch.tensor([token for passage in passages for token in passage.ids]),
        "lengths": torch.tensor([len(passage.ids) for passage in passages]),
    }
    for number, group in enumerate(adapter.groups()):
        for part in ("keys", "values"):
            # Each passage as (layers, m, g, k), so that a file does not depend on which layers are together.
            slots = [as_one(getattr(passage, part)[number]).cpu().transpose(1, 2) for passage in passages]
            for layer, table in zip(group.layers, zip(*slots, strict=True), strict=True):
                tables[f"{part}.{layer}"] = torch.cat(table)
    about: dict[str, object] = {"host": host, "has_windows": any(passage.has_windows for passage in passages)}
    if prefix:
        about["has_prefix"] = True
    write_tensors(path, tables, {"format": PASSAGES, "mmattn_version": __version__, **about})


def read_passages(
    path: str | PathLike[str], host: str, adapter: PassageLayers, vocab_size: int | None = None
) -> tuple[Passage | None, list[Passage]]:
    """Read the prefix and the passages that `write_passages` wrote for the host with this fingerprint.

    Keys and values stay in the file until they are used.

    Raises AdapterFileError if the file is torn, changed or something else, another host has read the passages, or the
    file holds what no host can have read.
    """
    with parse_errors(path, "passages"):
        tables, metadata = read_tensors(path, PASSAGES, mapped=True)
        if metadata.get("host") != host:
            raise AdapterFileError(
                f"the passages in {str(path)!r} were read by a host with other weights, config, LoRA or autocast: take "
                "the host that read them, or read them again, PassageCache(model).add(…)"
            )
        has_windows = validated(f"has_windows in {str(path)!r}", bool, metadata.get("has_windows"))
        has_prefix = validated(f"has_prefix in {str(path)!r}", bool, metadata.get("has_prefix", False))
        _check_passages(path, tables, adapter, vocab_size)
        lengths = tables["lengths"].tolist()
        parts = {name: table.split(lengths) for name, table in tables.items() if name != "lengths"}
        groups = adapter.groups()
        passages = [
            Passage(
                tuple(parts["ids"][number].tolist()),
                [[parts[f"keys.{layer}"][number].transpose(0, 1)[None] for layer in group.layers] for group in groups],
                [
                    [parts[f"values.{layer}"][number].transpose(0, 1)[None] for layer in group.layers]
                    for group in groups
                ],
                has_windows,
                lengths[0] if has_prefix and number else 0,
            )
            for number in range(len(lengths))
        ]
        prefix = passages.pop(0) if has_prefix else None
        if len({passage.ids for passage in passages}) != len(passages):
            raise AdapterFileError(f"{str(path)!r} holds a passage twice, and each is read once")
    return prefix, passages


def _check_passages(
    path: str | PathLike[str], tables: Mapping[str, Tensor], adapter: PassageLayers, vocab_size: int | None
) -> None:
    """Refuse tables of passages that this host cannot have read."""
    total = len(tables["ids"])
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "ids": ((total,), torch.int64),
        "lengths": ((tables["lengths"].numel(),), torch.int64),
    }
    for site in adapter.sites:
        assert site.heads is not None
        widths = {"keys": site.heads.head_dim, "values": site.heads.value_dim or site.heads.head_dim}
        for part, width in widths.items():
            kind = tables[f"{part}.{site.layer}"].dtype  # of keys that are rotated wider than of values, under autocast
            expected[f"{part}.{site.layer}"] = ((total, site.heads.num_kv_heads, width), kind)
            if not kind.is_floating_point or kind.itemsize == 1:
                raise AdapterFileError(f"the {part} in {str(path)!r} are {kind}, in which no host computes them")
        if tables[f"keys.{site.layer}"].dtype.itemsize < tables[f"values.{site.layer}"].dtype.itemsize:
            raise AdapterFileError(f"the keys in {str(path)!r} are narrower than the values, which no host computes")
    check_tensors(expected, tables)
    lengths, ids = tables["lengths"], tables["ids"]
    if not len(lengths) or int(lengths.min()) < 1 or int(lengths.max()) > total or int(lengths.sum()) != total:
        raise AdapterFileError(f"the passages in {str(path)!r} are not as long as it says, of {total} tokens in all")
    if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
        raise AdapterFileError(
            f"{str(path)!r} has ids from {int(ids.min())} to {int(ids.max())}, and the vocabulary of this host has "
            f"{vocab_size}"
        )
