"""Rows that are held out: those that were meant for it, or a share that is chosen."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmattn.data.datasets import DatasetRows, Rows, StreamRows
from mmattn.data.encoded_dataset import EncodedDataset, EncodedRow
from mmattn.data.folders import SPLITS, split_folders
from mmattn.data.read_rows import is_saved
from mmattn.data.rows import Row
from mmattn.errors import ConfigError, check_float

T = TypeVar("T")


def held_out_split(path: str) -> str | None:
    """The split of a folder, or of a saved dataset of Hugging Face, that is meant for measuring; None without one.

    Args:
        path: as `read_rows` is given it.
    """
    place = Path(path)
    if not place.is_dir():
        return None
    if is_saved(place):
        listed = place / "dataset_dict.json"
        splits = json.loads(listed.read_text(encoding="utf-8"))["splits"] if listed.is_file() else []
        kinds = {kind: name for name in splits for kind, names in SPLITS.items() if name.lower() in (kind, *names)}
    else:
        kinds = {kind: folder.name for kind, folder in split_folders(place).items()}
    return kinds.get("validation", kinds.get("test"))


def split_rows(rows: Rows, held_out: float, seed: int = 0) -> tuple[Rows, Sequence[Row]]:
    """Rows to train on, and rows that are never trained on. The rows of one picture are all on one side.

    Args:
        rows: what `read_rows` returned.
        held_out: a share below 1, or a number of rows from 1 on; of a stream its first ones, in numbers only.
        seed: of the random choice; a stream has none.

    Raises:
        ConfigError: a share of a stream, or nothing left to train on.
    """
    check_float("held_out", held_out, at_least=0)
    if isinstance(rows, StreamRows):
        if held_out != int(held_out):
            raise ConfigError(f"a stream has no length, so held_out must be a number of its rows, got {held_out}")
        count = int(held_out)
        given = (rows.dataset, rows.columns, rows.host)
        first = StreamRows(*given, take=count, template=rows.template)
        return StreamRows(*given, skip=count, template=rows.template), list(first)
    count = round(held_out * len(rows)) if held_out < 1 else int(held_out)
    count = max(1, count) if held_out else 0
    if count >= len(rows):
        raise ConfigError(f"{count} of {len(rows)} rows held out leave none to train on: give more rows, or less of it")
    if isinstance(rows, DatasetRows):
        order = _shuffled(range(len(rows)), seed)
        return rows.select(sorted(order[count:])), rows.select(sorted(order[:count]))
    # A picture with several captions must not be on both sides.
    groups: dict[Any, list[int]] = {}
    for number, shown in enumerate(_shown(rows)):
        groups.setdefault(number if shown is None else shown, []).append(number)
    away: list[int] = []
    for group in _shuffled(groups.values(), seed)[:-1]:
        if len(away) < count:
            away += group
    away_numbers = set(away)
    kept = [number for number in range(len(rows)) if number not in away_numbers]
    if isinstance(rows, EncodedDataset):
        return rows.select(kept), rows.select(sorted(away))
    return [rows[number] for number in kept], [rows[number] for number in sorted(away)]


def _shown(rows: Sequence[Row]) -> Iterator[Any]:
    """Of each row what its pictures are, or its memory in a store; None where that is not known."""
    for row in rows:
        if isinstance(row, EncodedRow):
            yield row.contents or None
        else:
            yield row.images if row.images and all(isinstance(image, str) for image in row.images) else None


def _shuffled(things: Iterable[T], seed: int) -> list[T]:
    order = list(things)
    random.Random(f"held out/{seed}").shuffle(order)
    return order
