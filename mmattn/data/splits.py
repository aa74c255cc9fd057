"""Rows that are held out of training, and rows with the memories of other rows, as a control."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from mmattn.data.encoded_dataset import EncodedRow
from mmattn.data.folders import SPLITS, split_folders
from mmattn.data.readers import DatasetRows, Rows, StreamRows, is_saved
from mmattn.data.row import Row
from mmattn.errors import ConfigError, check_float


def held_out_split(path: str) -> str | None:
    """Return the split of a folder or a saved dataset of Hugging Face that is meant for measuring; None without one.

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
    """Return rows to train on, and rows that are never trained on. The rows of one picture are all on one side.

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
        settings = (rows.columns, rows.host, rows.template)
        first = StreamRows(rows.dataset.take(int(held_out)), *settings)
        return StreamRows(rows.dataset.skip(int(held_out)), *settings), list(first)
    count = round(held_out * len(rows)) if held_out < 1 else int(held_out)
    count = max(1, count) if held_out else 0
    if count >= len(rows):
        raise ConfigError(f"{count} of {len(rows)} rows held out leave none to train on: give more rows, or less of it")
    groups: dict[object, list[int]] = {}
    for number, picture in enumerate(_pictures(rows)):
        groups.setdefault(number if picture is None else picture, []).append(number)
    order = list(groups.values())
    random.Random(f"held out/{seed}").shuffle(order)
    away: set[int] = set()
    for group in order[:-1]:
        if len(away) < count:
            away.update(group)
    return _select(rows, [number for number in range(len(rows)) if number not in away]), _select(rows, sorted(away))


def _pictures(rows: Sequence[Row]) -> Iterator[object]:
    """Iterate over the pictures, or encoded contents, of each row; None where they are not known."""
    if isinstance(rows, DatasetRows):  # its pictures are not read for this
        yield from itertools.repeat(None, len(rows))
        return
    for row in rows:
        if isinstance(row, EncodedRow):
            yield row.contents or None
        else:
            yield row.images if row.images and all(isinstance(image, str) for image in row.images) else None


def _select(rows: Sequence[Row], numbers: Sequence[int]) -> Sequence[Row]:
    select = getattr(rows, "select", None)
    return [rows[number] for number in numbers] if select is None else select(numbers)


class ShuffledMemories(Sequence[Row]):
    """Rows, each with the memory of row number `sources[n]`, read when they are asked for."""

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


def shuffle_memories(rows: Sequence[Row]) -> Sequence[Row]:
    """Return each row with the memory of another one that, if there is one, has another text and another memory.

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
    keys = [(n, (row.prompt, row.text), _memory_key(row, n)) for n, row in enumerate(rows) if row.has_memory]
    if len(keys) < 2:
        return []

    def unchanged(shift: int) -> int:
        """Count the rows that would get back their own text or memory."""
        pairs = ((keys[place - shift], keys[place]) for place in range(len(keys)))
        return sum(other[1] == own[1] or other[2] == own[2] for other, own in pairs)

    shifts = range(1, min(len(keys), 1001))  # a thousand are tried at most
    best = next((shift for shift in shifts if not unchanged(shift)), None) or min(shifts, key=unchanged)
    sources = list(range(len(rows)))
    for place, (number, *_) in enumerate(keys):
        sources[number] = keys[(place + best) % len(keys)][0]
    return ShuffledMemories(rows, sources)


def _memory_key(row: Row, number: int) -> object:
    """Return a key that differs between memories: paths, contents and texts; other objects count as different."""

    def key(part: object) -> object:
        if isinstance(part, bytes):
            return hashlib.sha256(part).digest()
        return part if isinstance(part, str) else number

    if isinstance(row, EncodedRow) and row.contents:
        return row.contents
    return (*map(key, row.images), row.passages, None if row.memory is None else key(row.memory))
