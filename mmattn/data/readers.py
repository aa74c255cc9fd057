"""Read rows from a file, a folder, tars, a dataset of Hugging Face or Lance, or encoded rows."""

from __future__ import annotations

import glob
import hashlib
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from mmattn.data.encoded_dataset import EncodedDataset, is_encoded
from mmattn.data.folders import CAPTIONS, PICTURES, FileRows, read_folder, read_lines
from mmattn.data.row import KEYS, Row, make_row, text_of_label
from mmattn.errors import ConfigError, import_extra

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

Values = Mapping[str, Any]
"""A row of a dataset, by its columns."""


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
    """Read the rows of a file, a folder or a dataset.

    - A .jsonl file, or a folder of pictures (see `read_folder`).
    - A dataset of Hugging Face, saved to a folder or on the hub; a Lance dataset in a folder.
    - Tars of webdataset: a .tar, a folder of them, or a pattern such as "data/{00000..00117}.tar".
    - Rows that `encode_rows` encoded: the folder, or an address.

    Args:
        path: of the file or folder, an address, or a name on the hub.
        host: "language" or "unet": what the rows are for.
        split: of a dataset of Hugging Face, or of a folder with folders `train`, `val`, `test`; None for "train".
        streaming: read a dataset as it arrives, or tars where they lie, without a copy in the cache of datasets.
        columns: from keys of a row to columns of a dataset, or from "label" to a column of classes; of tars a column is
            the ending of a file ("jpg"), or a key of a .json ("json.caption"). None for columns named as the keys.
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
    if is_encoded(path):
        _refuse(path, split=split, streaming=streaming, columns=columns, template=template)
        return EncodedDataset(path)
    tars = tar_files(path)
    if place.is_file() and not tars:
        _refuse(path, split=split, streaming=streaming, columns=columns, template=template)
        return read_lines(place, host, skip_broken=skip_broken)
    if place.is_dir() and not (tars or streaming or is_saved(place) or (place / "_versions").is_dir()):
        _refuse(path, columns=columns)
        return read_folder(place, host, split=split, template=template, skip_broken=skip_broken)
    if tars:
        _refuse(path, split=split)
    dataset = _dataset(path, tars, split or "train", streaming)
    names = getattr(dataset, "column_names", None) or list(next(iter(dataset), {}))
    chosen = _chosen_columns(path, names, _default_columns(dataset, names, host), columns, host, template)
    reader = StreamRows if streaming else DatasetRows
    return reader(_undecoded(dataset, chosen), chosen, host, template=template)


def _chosen_columns(
    path: str,
    names: Sequence[str],
    default: Mapping[str, str],
    columns: Mapping[str, str] | None,
    host: str,
    template: str | None,
) -> dict[str, str]:
    """From keys of a row to columns, checked."""
    chosen = dict(columns or default)
    keys = (*KEYS[host], "label")
    wrong = {key: name for key, name in chosen.items() if key not in keys or _column(name) not in names}
    needed = {"text"} if host == "language" else {"image"}
    if wrong or not needed <= {ROW_KEY.get(key, key) for key in chosen} or {"text", "label"} <= set(chosen):
        fault = ", ".join(f"{key}={name}" for key, name in wrong.items()) or f"nothing for {', '.join(needed)}"
        if {"text", "label"} <= set(chosen):
            fault = "both a text and a label"
        raise ConfigError(
            f"the columns of {path} are {', '.join(names)}, and the rows of this host have "
            f"{', '.join(KEYS[host])}: {fault} does not fit; name them, columns={{text: NAME, …}}, or "
            "columns={label: NAME, …} for classes"
        )
    _refuse(path, template=None if "label" in chosen else template)
    return chosen


def is_saved(place: Path) -> bool:
    """Return True for a folder that `datasets` saved."""
    return place.is_dir() and any((place / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _default_columns(dataset: Dataset | IterableDataset, names: Sequence[str], host: str) -> dict[str, str]:
    """Return columns named as the keys of a row, or by the endings of a tar's files; without a text, a label."""
    if "__key__" in names:
        return _tar_columns(dataset.features or {}, host)
    chosen = {key: key for key in KEYS[host] if key in names}
    return chosen if "text" in names or "label" not in names else {**chosen, "label": "label"}


def _tar_columns(features: Features, host: str) -> dict[str, str]:
    """Return the column of the pictures, and that of the texts or the keys of a .json."""
    image = next((name for name in features if f".{name}" in PICTURES), None)
    columns = {} if image is None else {"image": image}
    if "txt" in features:
        return columns | {"text": "txt"}
    known = {"caption": "text"} | {key: key for key in KEYS[host] if key not in ("image", "images", "memory")}
    return columns | {known[key]: f"json.{key}" for key in features.get("json") or () if key in known}


def _undecoded(dataset: Dataset | IterableDataset, columns: Mapping[str, str]) -> Dataset | IterableDataset:
    """Return the dataset with its pictures as they are stored, so that one that is broken can be left out."""
    datasets = import_extra("datasets", "train")
    for name in columns.values():
        if isinstance((dataset.features or {}).get(name), datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return dataset


def _is_hub_name(path: str) -> bool:
    """Return True for organisation/name where the organisation is no folder and the name no file."""
    folder, _, name = path.partition("/")
    files = (".jsonl", ".json", ".csv", ".txt", ".zip", ".tar.gz", ".lance")
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path)) and not name.endswith(files) and not Path(folder).is_dir()


def _refuse(path: str, **settings: object) -> None:
    option = next((name for name, value in settings.items() if value), None)
    if option is None:
        return
    kind = "class folders" if option == "template" else "a dataset of Hugging Face"
    if option == "split":
        kind = "a dataset of Hugging Face, or a folder of pictures with folders train and val"
    raise ConfigError(f"{option} only applies to {kind}, which {path} is not: leave it out")


def _dataset(path: str, tars: Sequence[Path], split: str, streaming: bool) -> Dataset | IterableDataset:
    if not tars and not Path(path).is_dir() and not _is_hub_name(path):
        raise ConfigError(
            f"there is no file or folder {path!r}, and a dataset on the hub is named organisation/name: give a .jsonl "
            "file, a folder of pictures with texts, or such a dataset"
        )
    datasets = import_extra("datasets", "train")
    try:
        if tars:
            for tar in tars:
                _check_tar(tar)
            files = {"train": [str(tar) for tar in tars]}
            return datasets.load_dataset("webdataset", data_files=files, split="train", streaming=streaming)
        if not is_saved(Path(path)):
            return datasets.load_dataset(path, split=split, streaming=streaming)
        dataset = datasets.load_from_disk(path)
        if isinstance(dataset, datasets.DatasetDict):
            dataset = dataset[split]
        return dataset.to_iterable_dataset() if streaming else dataset
    except (OSError, ValueError, KeyError, RuntimeError, tarfile.TarError) as error:
        kind = "tars of webdataset" if tars else "a dataset of Hugging Face or Lance"
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{path!r} cannot be read as {kind}, split {split!r}: {reason:.300}") from error


def tar_files(path: str) -> list[Path]:
    """Return the tars that a path stands for, in order; none for a folder with other folders, pictures or captions."""
    place = Path(path)
    if place.is_dir():
        names = [one for one in place.iterdir() if not one.name.startswith(".")]
        others = any(one.is_dir() or one.suffix.lower() in PICTURES or one.name in CAPTIONS for one in names)
        return [] if others else sorted(one for one in names if one.suffix == ".tar")
    if not path.endswith(".tar"):
        return []
    tars = [Path(one) for each in _expanded(path) for one in sorted(glob.glob(each) or [each])]
    missing = [one for one in tars if not one.is_file()]
    if missing:
        raise ConfigError(f"there is no file {missing[0]} ({len(missing)} of the {len(tars)} that {path} stands for)")
    return tars


def _expanded(pattern: str) -> list[str]:
    """Return the names that "{00000..00117}" in a pattern stands for."""
    span = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if span is None:
        return [pattern]
    numbers = (str(number).zfill(len(span[1])) for number in range(int(span[1]), int(span[2]) + 1))
    return [pattern[: span.start()] + number + pattern[span.end() :] for number in numbers]


def _check_tar(path: Path) -> None:
    """Refuse a tar that does not end after its last file: a damaged header looks like the end to tarfile."""
    with tarfile.open(path, "r:") as tar:
        members = tar.getmembers()
    last = max((one.offset_data + -(-one.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for one in members), default=0)
    with open(path, "rb") as file:
        file.seek(last)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ConfigError(f"{path} is truncated or damaged after its byte {last:,}: fetch the file again")


class _Columns:
    """A dataset and the columns of it that rows are made of."""

    kind: str

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        columns: Mapping[str, str],
        host: str = "language",
        template: str | None = None,
    ) -> None:
        self.dataset, self.columns, self.host, self.template = dataset, dict(columns), host, template
        feature = (getattr(dataset, "features", None) or {}).get(self.columns.get("label", ""))
        self._classes: Sequence[str] | None = getattr(feature, "names", None)

    @property
    def memory_kinds(self) -> set[str]:
        """The kinds of the memories' contents, by the columns."""
        keys = {"pictures": {"image", "images", "example"}, "passages": {"passage", "passages"}, "memories": {"memory"}}
        return {kind for kind, named in keys.items() if named & set(self.columns)}

    @property
    def summary(self) -> str:
        """One line that describes the rows."""
        return f"{self.kind} of a dataset ({', '.join(f'{key}={name}' for key, name in self.columns.items())})"

    def _row(self, values: Values, number: int) -> Row:
        try:
            named = {ROW_KEY.get(key, key): self._value(key, name, values) for key, name in self.columns.items()}
            return make_row(named, self.host)
        except ConfigError as error:
            raise ConfigError(f"row {number} of the dataset: {error}") from error

    def _value(self, key: str, name: str, values: Values) -> Any:
        value = values[_column(name)]
        if name.startswith("json."):
            value = None if value is None else value.get(name.removeprefix("json."))
        if name == "txt" and value is not None:
            value = value.strip()
        if key == "label":
            label = self._classes[value] if self._classes is not None and isinstance(value, int) else value
            return text_of_label(str(label).replace("_", " ").replace("-", " "), self.template)
        if isinstance(value, Mapping) and {"bytes", "path"} <= set(value):
            return value["path"] if value["bytes"] is None else value["bytes"]
        return value


class DatasetRows(_Columns, Sequence[Row]):
    """The rows of a dataset that lies on the disk, each built when it is asked for.

    Args:
        dataset: a `datasets.Dataset`.
        columns: from keys of a row to columns of the dataset, or from "label" to the column of classes that the texts
            are made of; other columns are not read.
        host: "language" or "unet".
        template: the text of a row with a label, see `read_folder`.
    """

    left_out: Sequence[str] = ()

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"{len(self)} rows"

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the dataset and its columns."""
        about = (self.dataset._fingerprint, sorted(self.columns.items()), self.template)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, number: int) -> Row: ...

    @overload
    def __getitem__(self, number: slice) -> DatasetRows: ...

    def __getitem__(self, number: int | slice) -> Row | DatasetRows:
        if isinstance(number, slice):
            return self.select(range(len(self))[number])
        return self._row(self.dataset[number], number)

    def select(self, numbers: Sequence[int]) -> DatasetRows:
        """Return the rows of these numbers."""
        return DatasetRows(self.dataset.select(numbers), self.columns, self.host, self.template)

    def text_lengths(self) -> list[int]:
        """Return `Row.text_length` of every row, for which no picture is opened."""
        texts = {key: name for key, name in self.columns.items() if key in ("text", "label", "prompt")}
        if not texts:
            return [0] * len(self)
        selected = self.dataset.select_columns([_column(name) for name in texts.values()])
        return [sum(len(self._value(key, name, one) or "") for key, name in texts.items()) for one in selected]


class StreamRows(_Columns):
    """The rows of a streamed dataset: it has no length, and is read once an epoch from its beginning.

    Args:
        dataset: a `datasets.IterableDataset`.
        columns: as in `DatasetRows`.
        host: "language" or "unet".
        template: the text of a row with a label, see `read_folder`.

    Attributes:
        skip_broken: leave out rows that cannot be used, and name them in `left_out`.
        left_out: rows that the last iteration left out, and why.
    """

    kind = "a stream of rows"
    skip_broken = False
    left_out: Sequence[str] = ()

    def __iter__(self) -> Iterator[Row]:
        left_out: list[str] = []
        self.left_out = left_out
        for number, values in enumerate(self.dataset):
            try:
                yield self._row(values, number)
            except ConfigError as error:
                if not self.skip_broken:
                    raise
                left_out.append(str(error))


def _column(name: str) -> str:
    """Return the column of the dataset that "json.caption" is a key of, or the name itself."""
    return "json" if name.startswith("json.") else name


ROW_KEY = {"label": "text"}
"""Keys of a row that other names of columns stand for."""
Rows = Sequence[Row] | StreamRows
