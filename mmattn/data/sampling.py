"""Choose rows: an order given by a seed, held-out rows, rows with the memories of other rows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from mmattn.data.readers import Rows, files_of
from mmattn.data.rows import MEMORY, row_memory
from mmattn.errors import ConfigError, check_float, check_int, import_extra

if TYPE_CHECKING:
    from datasets import Dataset


class PairSampler:
    """Pairs of an item and one of its texts, every item once an epoch.

    A function of seed and step alone: runs that differ in what they train see the same pairs, and a run resumed at a
    step goes on as if it had never stopped.

    Args:
        choices: for each item the texts that may go with it.
        batch_size: pairs per step.
        seed: of the order.

    Raises:
        ConfigError: no items, or one without texts.

    >>> order = PairSampler([[0], [1, 2], [1, 2]], batch_size=2, seed=7)
    >>> order.pairs(0) == PairSampler([[0], [1, 2], [1, 2]], batch_size=2, seed=7).pairs(0)
    True
    """

    def __init__(self, choices: Sequence[Sequence[int]], batch_size: int, seed: int = 0) -> None:
        if not choices or not all(len(texts) for texts in choices):
            raise ConfigError(f"every item needs at least one text; got {len(choices)} items, or one without")
        self.choices = [list(texts) for texts in choices]
        self.batch_size = check_int("batch_size", batch_size)
        self.seed = check_int("seed", seed, at_least=0)
        self._epoch: tuple[int, list[tuple[int, int]]] | None = None

    def pairs(self, step: int) -> list[tuple[int, int]]:
        """(item, text) of each row of the batch at `step`, counted from 0."""
        first = check_int("step", step, at_least=0) * self.batch_size
        return [self._pair(first + row) for row in range(self.batch_size)]

    def _pair(self, number: int) -> tuple[int, int]:
        epoch, place = divmod(number, len(self.choices))
        if self._epoch is None or self._epoch[0] != epoch:
            rng = random.Random(f"{self.seed}/{epoch}")
            items = list(range(len(self.choices)))
            rng.shuffle(items)
            self._epoch = (epoch, [(item, rng.choice(self.choices[item])) for item in items])
        return self._epoch[1][place]


def split_rows(dataset: Rows, held_out: float, seed: int = 0) -> tuple[Rows, Rows]:
    """Split rows into training and held-out rows. All rows of a picture are on the same side.

    Args:
        dataset: the rows.
        held_out: a share below 1, or a number of rows from 1 on; for a stream only a number, of its first rows.
        seed: seed of the random choice; unused for a stream.

    Raises:
        ConfigError: a share of a stream, or no row left to train on.
    """
    check_float("held_out", held_out, at_least=0)
    if isinstance(dataset, import_extra("datasets", "train").IterableDataset):
        if held_out != int(held_out):
            raise ConfigError(f"a stream has no length, so held_out must be a number of its rows, got {held_out}")
        return dataset.skip(int(held_out)), dataset.take(int(held_out))
    count = round(held_out * len(dataset)) if held_out < 1 else int(held_out)
    count = max(1, count) if held_out else 0
    if count >= len(dataset):
        raise ConfigError(
            f"{count} of {len(dataset)} rows held out leave none to train on: give more rows, or hold out fewer"
        )
    groups: dict[Hashable, list[int]] = {}
    for number, picture in enumerate(_pictures(dataset)):
        groups.setdefault(picture or number, []).append(number)
    order = list(groups.values())
    random.Random(f"held out/{seed}").shuffle(order)
    chosen: set[int] = set()
    for group in order[:-1]:
        if len(chosen) < count:
            chosen.update(group)
    return dataset.select([n for n in range(len(dataset)) if n not in chosen]), dataset.select(sorted(chosen))


def _pictures(dataset: Dataset) -> list[Hashable]:
    """Return the picture files of each row, or the contents of an encoded memory; None if unknown."""
    if "sources" in dataset.column_names:
        return [tuple(sources) if sources and all(sources) else None for sources in dataset["sources"]]
    name = next((name for name in ("image", "images") if name in dataset.column_names), None)
    return [None] * len(dataset) if name is None else [files or None for files in files_of(dataset, name)]


def shuffle_memories(dataset: Dataset) -> Dataset:
    """Return each row with the memory of another row that has, if there is such a row, another text and memory.

    Rows without a memory stay as they are. The memories move by one number of rows, the smallest that leaves the fewest
    rows with their own text or memory: of class folders by as many as a class has, of pictures with five captions each
    by five.

    Args:
        dataset: with a column `memory`.

    Returns:
        As many rows; none where fewer than two have a memory.
    """
    columns = [name for name in (*MEMORY, "sources") if name in dataset.column_names]
    keys = []
    for number, row in enumerate(dataset.with_format("torch")):
        if (memory := row_memory(row["memory"])) is not None:
            digest = hashlib.sha256(memory.tokens.numpy().tobytes()).digest()
            keys.append((number, (row.get("prompt"), row["text"]), digest))
    if len(keys) < 2:
        return dataset.select([])

    def unchanged(shift: int) -> int:
        """Count the rows that would get back their own text or memory."""
        pairs = ((keys[place - shift], keys[place]) for place in range(len(keys)))
        return sum(before[1] == after[1] or before[2] == after[2] for before, after in pairs)

    shifts = range(1, min(len(keys), 1001))  # a thousand are tried at most
    best = next((shift for shift in shifts if not unchanged(shift)), None) or min(shifts, key=unchanged)
    sources = list(range(len(dataset)))
    for place, (number, *_) in enumerate(keys):
        sources[number] = keys[(place + best) % len(keys)][0]
    concatenate = import_extra("datasets", "train").concatenate_datasets
    moved = dataset.select_columns(columns).select(sources)
    return concatenate([dataset.remove_columns(columns), moved], axis=1).with_format(dataset.format["type"])
