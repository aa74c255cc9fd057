"""Rows that are held out of training, and rows with the memories of other rows, as a control."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from mmattn.data.encoded_dataset import EncodedDataset, EncodedRow
from mmattn.data.folders import SPLITS, split_folders
from mmattn.data.readers import DatasetRows, Rows, StreamRows, is_saved
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
        return _split_stream(rows, held_out)
    count = round(held_out * len(rows)) if held_out < 1 else int(held_out)
    count = max(1, count) if held_out else 0
    if count >= len(rows):
        raise ConfigError(f"{count} of {len(rows)} rows held out leave none to train on: give more rows, or less of it")
    if isinstance(rows, DatasetRows):
        order = _shuffled(range(len(rows)), seed)
        return rows.select(sorted(order[count:])), rows.select(sorted(order[:count]))
    away = _held_out_numbers(rows, count, seed)
    rest = [number for number in range(len(rows)) if number not in away]
    if isinstance(rows, EncodedDataset):
        return rows.select(rest), rows.select(sorted(away))
    return [rows[number] for number in rest], [rows[number] for number in sorted(away)]


def _split_stream(rows: StreamRows, held_out: float) -> tuple[StreamRows, list[Row]]:
    """Hold out the first rows of a stream."""
    if held_out != int(held_out):
        raise ConfigError(f"a stream has no length, so held_out must be a number of its rows, got {held_out}")
    count = int(held_out)
    settings = (rows.columns, rows.host, rows.template)
    return StreamRows(rows.dataset.skip(count), *settings), list(StreamRows(rows.dataset.take(count), *settings))


def _held_out_numbers(rows: Sequence[Row], count: int, seed: int) -> set[int]:
    """Return numbers of rows, at least so many where there are; a picture with several captions is on one side."""
    groups: dict[Any, list[int]] = {}
    for number, content in enumerate(_shown(rows)):
        groups.setdefault(number if content is None else content, []).append(number)
    away: set[int] = set()
    for group in _shuffled(groups.values(), seed)[:-1]:
        if len(away) < count:
            away.update(group)
    return away


def _shown(rows: Sequence[Row]) -> Iterator[Any]:
    """Iterate over the pictures, or encoded contents, of each row; None where they are not known."""
    for row in rows:
        if isinstance(row, EncodedRow):
            yield row.contents or None
        else:
            yield row.images if row.images and all(isinstance(image, str) for image in row.images) else None


def _shuffled(things: Iterable[T], seed: int) -> list[T]:
    order = list(things)
    random.Random(f"held out/{seed}").shuffle(order)
    return order


_SHIFTS = 1000
"""Shifts that are tried, at most."""


class ShuffledMemories(Sequence[Row]):
    """Rows, each with the memory of another one; see `shuffle_memories`.

    Args:
        rows: as many, which are read when they are asked for.
        sources: for each row the number of the row whose memory it gets.
    """

    def __init__(self, rows: Sequence[Row], sources: Sequence[int]) -> None:
        self.rows, self.sources = rows, sources

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row, other = self.rows[index], self.rows[self.sources[index]]
        return replace(row, images=other.images, passages=other.passages, memory=other.memory)

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))


def shuffle_memories(rows: Sequence[Row]) -> Sequence[Row]:
    """Each row with the memory of another one that, where there is one, has another text and another memory.

    Rows without a memory stay as they are. The memories move by one number of rows, the smallest that leaves the fewest
    rows with their own text or memory: of class folders by as many as a class has, of pictures with five captions each
    by five.

    Args:
        rows: of any number.

    Returns:
        As many rows; none where fewer than two have a memory.

    >>> [row.passages for row in shuffle_memories([Row("a", passages=("x",)), Row("b"), Row("c", passages=("z",))])]
    [('z',), (), ('x',)]
    """
    having: list[int] = []
    texts, memories = _Numbers(), _Numbers()
    for number in range(len(rows)):
        row = rows[number]
        if row.has_memory:
            having.append(number)
            texts.add((row.prompt, row.text))
            memories.add(_memory_key(row, number))
    if len(having) < 2:
        return []
    kinds = [torch.tensor(one.numbers) for one in (texts, memories)]
    left_best, best = len(having) + 1, 1
    for shift in range(1, min(len(having) - 1, _SHIFTS) + 1):
        left = int(torch.stack([one == one.roll(-shift) for one in kinds]).any(0).sum())
        if left < left_best:
            left_best, best = left, shift
        if not left:
            break
    sources = list(range(len(rows)))
    for place, number in enumerate(having):
        sources[number] = having[(place + best) % len(having)]
    return ShuffledMemories(rows, sources)


class _Numbers:
    """Numbers that are equal where the things are."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.numbers: list[int] = []

    def add(self, thing: Any) -> None:
        self.numbers.append(self.known.setdefault(thing, len(self.known)))


def _memory_key(row: Row, number: int) -> Any:
    """Return a key that differs between memories: paths, contents and texts; other objects count as different."""

    def key(part: Any) -> Any:
        if isinstance(part, (bytes, bytearray)):
            return hashlib.sha256(part).digest()
        return part if isinstance(part, str) else number

    if isinstance(row, EncodedRow) and row.contents:
        return row.contents
    return (*map(key, row.images), row.passages, key(row.memory) if row.memory is not None else None)
