"""Which shard encodes which content: the checksums of all contents, and the first place of each.

The checksums of the contents of a shard's rows are written to a small file of their own, by any process. Once all of
them are there, every process finds the same owner of each content without asking another: the shard where it comes
first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.adapter_config import check_tensors
from mmattn.data.row_contents import content_sha256, encoded_parts
from mmattn.data.rows import Row
from mmattn.errors import AdapterFileError
from mmattn.storage.json_files import making_sense
from mmattn.storage.safetensors import read_tensors, write_tensors

FORMAT = "mmattn-store-contents"


@dataclass(frozen=True)
class Contents:
    """The contents of the memories of some rows.

    Args:
        keys: (p, 32) uint8, a sha256 of each part, row after row.
        counts: (n,) int32, parts of each row.
    """

    keys: Tensor
    counts: Tensor

    @classmethod
    def of(cls, rows: Iterable[Row | str]) -> Contents:
        """Those of rows, whose files are read.

        Args:
            rows: and in the place of one that cannot be used the reason.

        Raises:
            ConfigError: a picture of a type that has no content.
            OSError: a file that cannot be read.
        """
        keys, counts = bytearray(), []
        for row in rows:
            parts = parts_of(row)
            counts.append(len(parts))
            for kind, part in parts:
                keys += content_key(kind, part)
        return cls(_rows(keys), torch.tensor(counts, dtype=torch.int32))

    def save(self, path: Path, plan: str) -> None:
        """Write them to a file, atomically.

        Args:
            path: of the file.
            plan: sha256 of the plan that the rows are of.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        write_tensors(path, {"keys": self.keys, "counts": self.counts}, {"format": FORMAT, "plan": plan})

    @classmethod
    def load(cls, path: Path, plan: str) -> Contents | None:
        """Read what `save` wrote; None where it is not there, torn, or of another plan.

        Args:
            path: of the file.
            plan: sha256 of the plan.
        """
        try:
            with making_sense(path, "contents"):
                tensors, about = read_tensors(path, FORMAT)
                found = cls(tensors["keys"], tensors["counts"])
                check_tensors(
                    {"keys": ((len(found.keys), 32), torch.uint8), "counts": ((len(found.counts),), torch.int32)},
                    tensors,
                )
        except AdapterFileError:
            return None
        counted = found.counts.min() >= 0 and int(found.counts.sum()) == len(found.keys) if len(found.counts) else True
        return found if about.get("plan") == plan and counted else None


def parts_of(row: Row | str) -> list[tuple[str, Any]]:
    """The parts of a row's memory in order, each with its kind: pictures, passages, and what it comes with.

    Args:
        row: or the reason why it cannot be used: then it has none.
    """
    if isinstance(row, str):
        return []
    return encoded_parts(row) + ([] if row.memory is None else [("memories", row.memory)])


def content_key(kind: str, part: Any) -> bytes:
    """A sha256 of the kind and content of a part.

    Args:
        kind: "pictures", "passages" or "memories".
        part: of this kind.

    Raises:
        ConfigError: a picture of a type that has no content.
        OSError: a file that cannot be read.
    """
    return hashlib.sha256(f"{kind} {content_sha256(kind, part)}".encode()).digest()


def owners(earlier: Sequence[Tensor], contents: Sequence[Contents]) -> list[Tensor]:
    """The entry of each part: shard, and number in the shard, of the first part with its content.

    Args:
        earlier: (n, 32) uint8 of each shard that was there before, the keys of its entries.
        contents: of each shard that comes after them.

    Returns:
        Of each shard of `contents` (p, 2) int64, in the order of its parts.

    >>> a, b = (torch.full((1, 32), value, dtype=torch.uint8) for value in (3, 5))
    >>> given = [Contents(torch.cat([a, b]), torch.tensor([2])), Contents(torch.cat([b, a]), torch.tensor([1, 1]))]
    >>> [found.tolist() for found in owners([b], given)]
    [[[1, 0], [0, 0]], [[0, 0], [1, 0]]]
    """
    keys = [*earlier, *(one.keys for one in contents)]
    sizes = torch.tensor([len(one) for one in keys])
    places = torch.arange(int(sizes.sum()))
    _, content = torch.unique(torch.cat(keys).view(torch.int64), dim=0, return_inverse=True)
    first = torch.full_like(places, len(places)).scatter_reduce_(0, content, places, "amin")[content]
    # An entry is counted within its shard, among the parts that are the first of their content.
    begins = torch.cumsum(torch.nn.functional.pad((first == places).long(), (1, 0)), 0)
    shard = torch.repeat_interleave(torch.arange(len(keys)), sizes)
    starts = torch.cumsum(sizes, 0) - sizes
    entry = begins[first] - begins[starts[shard[first]]]
    found = torch.stack([shard[first], entry], 1)
    return list(found.split(sizes.tolist()))[len(earlier) :]


def _rows(keys: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(keys) or bytearray(32), dtype=torch.uint8).view(-1, 32)[: len(keys) // 32]
