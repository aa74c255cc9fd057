"""Rows of a dataset of Hugging Face, in memory or as a stream; rows of any source, and their split."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from mmattn.errors import ConfigError, check_float, import_extra
from mmattn.training.row_files import FileRows, read_lines
from mmattn.training.row_folders import SPLITS, read_folder, split_folders
from mmattn.training.rows import KEYS, Row, make_row, text_of_label


class DatasetRows(Sequence[Row]):
    """The rows of a dataset of Hugging Face that lies on the disk, each built when it is asked for.

    Args:
        dataset: a `datasets.Dataset`.
        columns: from keys of a row to columns of the dataset, or from "label" to the column of classes that the texts
            are made of; other columns are not read.
        host: "language" or "unet".
        template: the text of a row with a label, see `read_folder`.
    """

    left_out: Sequence[str] = ()

    def __init__(
        self, dataset: Any, columns: Mapping[str, str], host: str = "language", template: str | None = None
    ) -> None:
        self.dataset, self.columns, self.host, self.template = dataset, dict(columns), host, template
        self._reader = _Reader(dataset, self.columns, host, template)

    @property
    def fingerprint(self) -> str:
        """What tells these rows from those of another dataset, or of other columns."""
        about = (self.dataset._fingerprint, sorted(self.columns.items()), self.template)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    @property
    def found(self) -> str:
        """What was found, in one line."""
        columns = ", ".join(f"{key}={name}" for key, name in self.columns.items())
        return f"{len(self)} rows of a dataset of Hugging Face ({columns})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return self.select(range(len(self))[number])
        return self._reader.row(self.dataset[number], number)

    def select(self, numbers: Sequence[int]) -> DatasetRows:
        """The rows of these numbers."""
        return DatasetRows(self.dataset.select(numbers), self.columns, self.host, self.template)

    def text_lengths(self) -> list[int]:
        """`Row.text_length` of every row, for which no picture is opened."""
        texts = {key: name for key, name in self.columns.items() if key in ("text", "label", "prompt")}
        if not texts:
            return [0] * len(self)
        shown = self.dataset.select_columns(list(texts.values()))
        return [sum(len(self._reader.value(key, one[name]) or "") for key, name in texts.items()) for one in shown]


class StreamRows:
    """The rows of a streamed dataset: it has no length, and is read once an epoch from its beginning.

    Args:
        dataset: a `datasets.IterableDataset`.
        columns: as in `DatasetRows`.
        host: "language" or "unet".
        skip: rows to leave out at the beginning.
        take: rows to read at most; None for all.
        template: the text of a row with a label, see `read_folder`.
        skip_broken: leave out rows that cannot be used, and name them in `left_out`.

    Attributes:
        left_out: rows that the last iteration left out, and why.
    """

    def __init__(
        self,
        dataset: Any,
        columns: Mapping[str, str],
        host: str = "language",
        skip: int = 0,
        take: int | None = None,
        template: str | None = None,
        skip_broken: bool = False,
    ) -> None:
        self.dataset, self.columns, self.host, self.skip, self.take = dataset, dict(columns), host, skip, take
        self.template, self.skip_broken = template, skip_broken
        self.left_out: list[str] = []
        self._reader = _Reader(dataset, self.columns, host, template)

    @property
    def found(self) -> str:
        """What was found, in one line."""
        columns = ", ".join(f"{key}={name}" for key, name in self.columns.items())
        return f"a stream of rows of a dataset of Hugging Face ({columns})"

    def __iter__(self) -> Iterator[Row]:
        end = None if self.take is None else self.skip + self.take
        self.left_out = []
        for number, given in enumerate(itertools.islice(self.dataset, self.skip, end), start=self.skip):
            try:
                row = self._reader.row(given, number)
            except ConfigError as error:
                if not self.skip_broken:
                    raise
                self.left_out.append(str(error))
                continue
            yield row


class _Reader:
    """From the columns of a dataset to rows."""

    def __init__(self, dataset: Any, columns: Mapping[str, str], host: str, template: str | None) -> None:
        self.columns, self.host, self.template = columns, host, template
        feature = (getattr(dataset, "features", None) or {}).get(columns.get("label", ""))
        self.classes: Sequence[str] | None = getattr(feature, "names", None)

    def row(self, given: Mapping[str, Any], number: int) -> Row:
        try:
            values = {_ROW_KEY.get(key, key): self.value(key, given[name]) for key, name in self.columns.items()}
            return make_row(values, self.host)
        except ConfigError as error:
            raise ConfigError(f"row {number} of the dataset: {error}") from error

    def value(self, key: str, value: Any) -> Any:
        if key == "label":
            name = self.classes[value] if self.classes is not None and isinstance(value, int) else value
            return text_of_label(str(name).replace("_", " ").replace("-", " "), self.template)
        if isinstance(value, Mapping) and {"bytes", "path"} <= set(value):
            return value["path"] if value["bytes"] is None else value["bytes"]
        return value


_ROW_KEY = {"label": "text"}
Rows = Sequence[Row] | StreamRows


def read_rows(
    path: str,
    host: str = "language",
    *,
    split: str | None = None,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    skip_broken: bool = False,
) -> FileRows | DatasetRows | StreamRows:
    """Rows of a .jsonl file, a folder of pictures, or a dataset of Hugging Face (saved to a folder, or on the hub).

    Args:
        path: of the file or folder, or a name on the hub.
        host: "language" or "unet": what the rows are for.
        split: of a dataset of Hugging Face, or of a folder with folders `train`, `val`, `test`; None for "train".
        streaming: read a dataset of Hugging Face as it arrives.
        columns: from keys of a row to columns of a dataset of Hugging Face, or from "label" to a column of classes;
            None for columns named as the keys.
        template: the text of a picture of which only the class is known, see `read_folder`.
        skip_broken: leave out pictures and lines of a file or folder that cannot be used, and name them in `left_out`
            of the result.

    Returns:
        The rows, whose `found` says in one line what they are.

    Raises:
        ConfigError: nothing of that name, rows that cannot be used, or settings of a dataset for a file or folder.
        MissingExtraError: datasets is not installed.
    """
    place = Path(path)
    if place.is_file():
        _refuse(path, split=split, streaming=streaming, columns=columns, template=template)
        return read_lines(place, host, skip_broken=skip_broken)
    saved = _is_saved(place)
    if place.is_dir() and not saved and not streaming:
        _refuse(path, columns=columns)
        return read_folder(place, host, split=split, template=template, skip_broken=skip_broken)
    if not place.is_dir() and not _is_hub_name(path):
        # Asked for it, the hub is tried again and again where it cannot be reached.
        raise ConfigError(
            f"there is no file or folder {path!r}, and a dataset on the hub is named organisation/name: give a .jsonl "
            "file, a folder of pictures with texts, or such a dataset"
        )
    dataset = _dataset(path, saved, split or "train", streaming)
    names = getattr(dataset, "column_names", None) or list(next(iter(dataset), {}))
    chosen = dict(columns) if columns else _columns(names, host)
    wrong = {key: name for key, name in chosen.items() if key not in (*KEYS[host], "label") or name not in names}
    needed = {"text"} if host == "language" else {"image"}
    if wrong or not needed <= {_ROW_KEY.get(key, key) for key in chosen} or {"text", "label"} <= set(chosen):
        said = ", ".join(f"{key}={name}" for key, name in wrong.items()) or f"nothing for {', '.join(needed)}"
        if {"text", "label"} <= set(chosen):
            said = "both a text and a label"
        raise ConfigError(
            f"the columns of {path} are {', '.join(names)}, and the rows of this host have "
            f"{', '.join(KEYS[host])}: {said} does not fit; say which column is which with "
            "columns={text: NAME, …}, or with columns={label: NAME, …} where it holds classes"
        )
    if template is not None and "label" not in chosen:
        _refuse(path, template=template)
    dataset = _undecoded(dataset, chosen)
    if streaming:
        return StreamRows(dataset, chosen, host, template=template)
    return DatasetRows(dataset, chosen, host, template)


def held_out_split(path: str) -> str | None:
    """The split of a folder, or of a saved dataset of Hugging Face, that is meant for measuring; None without one.

    Args:
        path: as `read_rows` is given it.
    """
    place = Path(path)
    if not place.is_dir():
        return None
    if _is_saved(place):
        listed = place / "dataset_dict.json"
        splits = json.loads(listed.read_text(encoding="utf-8"))["splits"] if listed.is_file() else []
        kinds = {kind: name for name in splits for kind, names in SPLITS.items() if name.lower() in (kind, *names)}
    else:
        kinds = {kind: folder.name for kind, folder in split_folders(place).items()}
    return kinds.get("validation", kinds.get("test"))


def _is_saved(place: Path) -> bool:
    return place.is_dir() and any((place / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _columns(names: Sequence[str], host: str) -> dict[str, str]:
    """Columns named as the keys of a row, and where no text is among them, one of classes."""
    chosen = {key: key for key in KEYS[host] if key in names}
    return chosen if "text" in names or "label" not in names else {**chosen, "label": "label"}


def _undecoded(dataset: Any, columns: Mapping[str, str]) -> Any:
    """The dataset with its pictures as they are stored: read here, one that is broken can be named and left out."""
    datasets = import_extra("datasets", "train")
    for name in columns.values():
        if isinstance((dataset.features or {}).get(name), datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return dataset


def _is_hub_name(path: str) -> bool:
    """Whether what is not on the disk may be on the hub: organisation/name, and no file of a folder that is here."""
    folder, _, name = path.partition("/")
    files = (".jsonl", ".json", ".csv", ".txt", ".zip", ".tar.gz")
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path)) and not name.endswith(files) and not Path(folder).is_dir()


def _refuse(path: str, **settings: Any) -> None:
    given = next((name for name, value in settings.items() if value), None)
    if given is None:
        return
    kind = "class folders" if given == "template" else "a dataset of Hugging Face"
    if given == "split":
        kind = "a dataset of Hugging Face, or a folder of pictures with folders train and val"
    raise ConfigError(f"{given} is for {kind}, and {path} is none: leave it out, or give such data")


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
        kept, away = (rows.select(part) for part in _split(rows, count, seed))
        return kept, away
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
