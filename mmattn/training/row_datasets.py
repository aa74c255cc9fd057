"""Rows of a dataset of Hugging Face, in memory or as a stream; rows of any source, and their split."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from mmattn.errors import ConfigError, check_float, import_extra
from mmattn.training.row_files import read_folder, read_lines
from mmattn.training.rows import KEYS, Row, make_row


class DatasetRows(Sequence[Row]):
    """The rows of a dataset of Hugging Face that lies on the disk, each built when it is asked for.

    Args:
        dataset: a `datasets.Dataset`.
        columns: from keys of a row to columns of the dataset; other columns are not read.
        host: "language" or "unet".
    """

    def __init__(self, dataset: Any, columns: Mapping[str, str], host: str = "language") -> None:
        self.dataset, self.columns, self.host = dataset, dict(columns), host

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            chosen = range(len(self))[number]
            return DatasetRows(self.dataset.select(chosen), self.columns, self.host)
        return _row_of(self.dataset[number], self.columns, self.host, number)

    def text_lengths(self) -> list[int]:
        """`Row.text_length` of every row, for which no picture is opened."""
        texts = [column for key, column in self.columns.items() if key in ("text", "prompt")]
        if not texts:
            return [0] * len(self)
        return [sum(len(one[name] or "") for name in texts) for one in self.dataset.select_columns(texts)]


class StreamRows:
    """The rows of a streamed dataset: it has no length, and is read once an epoch from its beginning.

    Args:
        dataset: a `datasets.IterableDataset`.
        columns: from keys of a row to columns of the dataset; other columns are not read.
        host: "language" or "unet".
        skip: rows to leave out at the beginning.
        take: rows to read at most; None for all.
    """

    def __init__(
        self,
        dataset: Any,
        columns: Mapping[str, str],
        host: str = "language",
        skip: int = 0,
        take: int | None = None,
    ) -> None:
        self.dataset, self.columns, self.host, self.skip, self.take = dataset, dict(columns), host, skip, take

    def __iter__(self) -> Iterator[Row]:
        end = None if self.take is None else self.skip + self.take
        for number, given in enumerate(itertools.islice(self.dataset, self.skip, end), start=self.skip):
            yield _row_of(given, self.columns, self.host, number)


Rows = Sequence[Row] | StreamRows


def read_rows(
    path: str,
    host: str = "language",
    *,
    split: str | None = None,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Rows:
    """Rows of a .jsonl file, a folder of pictures, or a dataset of Hugging Face (saved to a folder, or on the hub).

    Args:
        path: of the file or folder, or a name on the hub.
        host: "language" or "unet": what the rows are for.
        split: of a dataset of Hugging Face; None for "train".
        streaming: read a dataset of Hugging Face as it arrives.
        columns: from keys of a row to columns of a dataset of Hugging Face; None for columns named as the keys.

    Raises:
        ConfigError: nothing of that name, rows that cannot be used, or settings of a dataset for a file or folder.
        MissingExtraError: datasets is not installed.
    """
    place = Path(path)
    if place.is_file():
        _refuse(path, split=split, streaming=streaming, columns=columns)
        return read_lines(place, host)
    saved = place.is_dir() and any((place / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if place.is_dir() and not saved and not streaming:
        _refuse(path, split=split, columns=columns)
        return read_folder(place, host)
    if not place.is_dir() and not _is_hub_name(path):
        # Asked for it, the hub is tried again and again where it cannot be reached.
        raise ConfigError(
            f"there is no file or folder {path!r}, and a dataset on the hub is named organisation/name: give a .jsonl "
            "file, a folder of pictures with texts, or such a dataset"
        )
    dataset = _dataset(path, saved, split or "train", streaming)
    names = getattr(dataset, "column_names", None) or list(next(iter(dataset), {}))
    chosen = dict(columns) if columns else {key: key for key in KEYS[host] if key in names}
    wrong = {key: name for key, name in chosen.items() if key not in KEYS[host] or name not in names}
    needed = {"text"} if host == "language" else {"image"}
    if wrong or not needed <= set(chosen):
        said = ", ".join(f"{key}={name}" for key, name in wrong.items()) or f"nothing for {', '.join(needed)}"
        raise ConfigError(
            f"the columns of {path} are {', '.join(names)}, and the rows of this host have {', '.join(KEYS[host])}: "
            f"{said} does not fit; say which column is which with columns={{text: NAME, …}}"
        )
    return StreamRows(dataset, chosen, host) if streaming else DatasetRows(dataset, chosen, host)


def _is_hub_name(path: str) -> bool:
    """Whether what is not on the disk may be on the hub: organisation/name, and no file of a folder that is here."""
    folder, _, name = path.partition("/")
    files = (".jsonl", ".json", ".csv", ".txt", ".zip", ".tar.gz")
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path)) and not name.endswith(files) and not Path(folder).is_dir()


def _refuse(path: str, **settings: Any) -> None:
    given = next((name for name, value in settings.items() if value), None)
    if given is not None:
        raise ConfigError(
            f"{given} is for a dataset of Hugging Face, and {path} is none: leave it out, or give such a dataset"
        )


def _dataset(path: str, saved: bool, split: str, streaming: bool) -> Any:
    datasets = import_extra("datasets", "train")
    try:
        if not saved:
            return datasets.load_dataset(path, split=split, streaming=streaming)
        dataset = datasets.load_from_disk(path)
        if isinstance(dataset, datasets.DatasetDict):
            dataset = dataset[split]
        return dataset.to_iterable_dataset() if streaming else dataset
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{path!r} is neither a .jsonl file, a folder of pictures with texts, nor a dataset of Hugging Face with "
            f"the split {split!r}: {' '.join(str(error).split())[:300]}"
        ) from error


def _row_of(given: Mapping[str, Any], columns: Mapping[str, str], host: str, number: int) -> Row:
    try:
        return make_row({key: given[name] for key, name in columns.items()}, host)
    except ConfigError as error:
        raise ConfigError(f"row {number} of the dataset: {error}") from error


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
        first = StreamRows(rows.dataset, rows.columns, rows.host, take=count)
        return StreamRows(rows.dataset, rows.columns, rows.host, skip=count), list(first)
    count = round(held_out * len(rows)) if held_out < 1 else int(held_out)
    count = max(1, count) if held_out else 0
    if count >= len(rows):
        raise ConfigError(f"{count} of {len(rows)} rows held out leave none to train on: give more rows, or less of it")
    if isinstance(rows, DatasetRows):
        parts = [DatasetRows(rows.dataset.select(part), rows.columns, rows.host) for part in _split(rows, count, seed)]
        return parts[0], parts[1]
    # A picture with several captions must not be on both sides.
    groups: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        paths = row.images if row.images and all(isinstance(image, str) for image in row.images) else number
        groups.setdefault(paths, []).append(number)
    chosen = set(_split(groups, min(count, len(groups) - 1), seed)[1])
    away_numbers = {number for place, group in enumerate(groups.values()) if place in chosen for number in group}
    sides = ([row for i, row in enumerate(rows) if (i in away_numbers) == side] for side in (False, True))
    return next(sides), next(sides)


def _split(things: Sized, count: int, seed: int) -> tuple[list[int], list[int]]:
    order = list(range(len(things)))
    random.Random(f"held out/{seed}").shuffle(order)
    return sorted(order[count:]), sorted(order[:count])
