"""Read rows from a file, a folder, tars, a dataset of Hugging Face or Lance, or encoded rows."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.data.encoded_dataset import EncodedDataset, is_encoded
from mmattn.data.folders import FileRows, read_folder, read_lines
from mmattn.data.rows import KEYS, Row, make_row, text_of_label
from mmattn.data.tables import LanceTable, RowTable, TarSamples, is_lance, tar_files
from mmattn.errors import ConfigError, import_extra


def read_rows(
    path: str,
    host: str = "language",
    *,
    split: str | None = None,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    skip_broken: bool = False,
) -> FileRows | DatasetRows | StreamRows | EncodedDataset:
    """Rows of a file, a folder or a dataset.

    - A .jsonl file, or a folder of pictures (see `read_folder`).
    - A dataset of Hugging Face, saved to a folder or on the hub.
    - Tars of webdataset: a .tar, a folder of them, or a pattern such as "data/{00000..00117}.tar".
    - A Lance dataset: its folder, or an address that ends in .lance.
    - Rows that `encode_rows` encoded: the folder, or any other address.

    Args:
        path: of the file or folder, an address, or a name on the hub.
        host: "language" or "unet": what the rows are for.
        split: of a dataset of Hugging Face, or of a folder with folders `train`, `val`, `test`; None for "train".
        streaming: read a dataset of Hugging Face as it arrives.
        columns: from keys of a row to columns of a dataset, or from "label" to a column of classes; of tars a column is
            the ending of a file ("jpg;png", "json.caption"). None for columns named as the keys.
        template: the text of a picture of which only the class is known, see `read_folder`.
        skip_broken: leave out pictures and lines of a file or folder that cannot be used, and name them in `left_out`
            of the result.

    Returns:
        The rows, whose `summary` describes them in one line.

    Raises:
        ConfigError: nothing of that name, rows that cannot be used, or settings of a dataset for a file or folder.
        AdapterFileError: damaged files of encoded rows.
        MissingExtraError: what reads them is not installed.
    """
    place = Path(path)
    if is_encoded(path) and not is_lance(path):
        _refuse(path, split=split, streaming=streaming, columns=columns, template=template)
        return EncodedDataset(path)
    tars = tar_files(path)
    if tars or is_lance(path):
        _refuse(path, split=split, streaming=streaming)
        table = TarSamples(tars) if tars else LanceTable(path)
        chosen = _chosen_columns(path, table.column_names, table.default_columns(host), columns, host, template)
        return DatasetRows(table, chosen, host, template)
    if place.is_file():
        _refuse(path, split=split, streaming=streaming, columns=columns, template=template)
        return read_lines(place, host, skip_broken=skip_broken)
    saved = is_saved(place)
    if place.is_dir() and not saved and not streaming:
        _refuse(path, columns=columns)
        return read_folder(place, host, split=split, template=template, skip_broken=skip_broken)
    dataset = _dataset(path, saved, split or "train", streaming)
    names = getattr(dataset, "column_names", None) or list(next(iter(dataset), {}))
    chosen = _chosen_columns(path, names, _columns(names, host), columns, host, template)
    dataset = _undecoded(dataset, chosen)
    reader = StreamRows if streaming else DatasetRows
    return reader(dataset, chosen, host, template=template)


def _chosen_columns(
    path: str,
    names: Sequence[str],
    own: Mapping[str, str],
    columns: Mapping[str, str] | None,
    host: str,
    template: str | None,
) -> dict[str, str]:
    """From keys of a row to columns, checked."""
    chosen = dict(columns) if columns else dict(own)
    keys = (*KEYS[host], "label")
    wrong = {key: name for key, name in chosen.items() if key not in keys or not set(name.split(";")) & set(names)}
    needed = {"text"} if host == "language" else {"image"}
    if wrong or not needed <= {ROW_KEY.get(key, key) for key in chosen} or {"text", "label"} <= set(chosen):
        said = ", ".join(f"{key}={name}" for key, name in wrong.items()) or f"nothing for {', '.join(needed)}"
        if {"text", "label"} <= set(chosen):
            said = "both a text and a label"
        raise ConfigError(
            f"the columns of {path} are {', '.join(names)}, and the rows of this host have "
            f"{', '.join(KEYS[host])}: {said} does not fit; say which column is which with "
            "columns={text: NAME, …}, or with columns={label: NAME, …} where it holds classes"
        )
    _refuse(path, template=None if "label" in chosen else template)
    return chosen


def is_saved(place: Path) -> bool:
    """Return True for a folder that `datasets` saved."""
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
    """Return True for organisation/name where the organisation is no folder and the name no file."""
    folder, _, name = path.partition("/")
    files = (".jsonl", ".json", ".csv", ".txt", ".zip", ".tar.gz")
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path)) and not name.endswith(files) and not Path(folder).is_dir()


def _refuse(path: str, **settings: Any) -> None:
    option = next((name for name, value in settings.items() if value), None)
    if option is None:
        return
    kind = "class folders" if option == "template" else "a dataset of Hugging Face"
    if option == "split":
        kind = "a dataset of Hugging Face, or a folder of pictures with folders train and val"
    raise ConfigError(f"{option} only applies to {kind}, which {path} is not: leave it out")


def _dataset(path: str, saved: bool, split: str, streaming: bool) -> Any:
    if not Path(path).is_dir() and not _is_hub_name(path):
        # Without this the hub is tried again and again where it cannot be reached.
        raise ConfigError(
            f"there is no file or folder {path!r}, and a dataset on the hub is named organisation/name: give a .jsonl "
            "file, a folder of pictures with texts, or such a dataset"
        )
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


class DatasetRows(Sequence[Row]):
    """The rows of a dataset that lies on the disk, each built when it is asked for.

    Args:
        dataset: a `datasets.Dataset`, or a table of tars or of Lance.
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
    def memory_kinds(self) -> set[str]:
        """The kinds of the memories' contents, by the columns."""
        return _memory_kinds(self.columns)

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the dataset and its columns."""
        own = self.dataset.fingerprint if isinstance(self.dataset, RowTable) else self.dataset._fingerprint
        about = (own, sorted(self.columns.items()), self.template)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    @property
    def summary(self) -> str:
        """One line that describes the rows."""
        columns = ", ".join(f"{key}={name}" for key, name in self.columns.items())
        kind = self.dataset.described if isinstance(self.dataset, RowTable) else "a dataset of Hugging Face"
        return f"{len(self)} rows of {kind} ({columns})"

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
    def memory_kinds(self) -> set[str]:
        """The kinds of the memories' contents, by the columns."""
        return _memory_kinds(self.columns)

    @property
    def summary(self) -> str:
        """One line that describes the rows."""
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


def _memory_kinds(columns: Mapping[str, str]) -> set[str]:
    keys = {"pictures": {"image", "images", "example"}, "passages": {"passage", "passages"}, "memories": {"memory"}}
    return {kind for kind, named in keys.items() if named & set(columns)}


class _Reader:
    """From the columns of a dataset to rows."""

    def __init__(self, dataset: Any, columns: Mapping[str, str], host: str, template: str | None) -> None:
        self.columns, self.host, self.template = columns, host, template
        feature = (getattr(dataset, "features", None) or {}).get(columns.get("label", ""))
        self.classes: Sequence[str] | None = getattr(feature, "names", None)

    def row(self, given: Mapping[str, Any], number: int) -> Row:
        try:
            values = {ROW_KEY.get(key, key): self.value(key, given[name]) for key, name in self.columns.items()}
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


ROW_KEY = {"label": "text"}
"""Keys of a row that other names of columns stand for."""
Rows = Sequence[Row] | StreamRows
