"""Datasets of rows: `datasets.load_dataset` for files, folders, tars and the hub, with the columns that rows have."""

from __future__ import annotations

import glob
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mmattn.data.rows import ACCEPTED, COLUMNS, Values, unknown_column
from mmattn.encoders.base import undecoded
from mmattn.errors import ConfigError, check_choice, import_extra
from mmattn.storage.files import files_below

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

Rows: TypeAlias = "Dataset | IterableDataset"
PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
TEMPLATE = "A photo of a {label}."
"""The text of a picture of which only the class is known."""
_BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
_FILES = ("image", "images", "example", "memory")
"""Columns that may hold paths."""


def read_rows(
    path: str | os.PathLike[str],
    host: str = "language",
    *,
    split: str | None = None,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
) -> Dataset | DatasetDict | IterableDataset | IterableDatasetDict:
    """Load a dataset with `datasets.load_dataset`, and rename its columns to those of a row.

    - A .jsonl, .json or .csv file; its paths are relative to its folder.
    - A folder of pictures: with a `.txt` of the same name beside each, or as `load_dataset("imagefolder")` reads them,
      with `metadata.jsonl` or class folders.
    - Tars of webdataset: a .tar, or a pattern such as "data/*.tar".
    - A dataset that was saved to a folder or an address of fsspec (`save_to_disk`, `mmattn encode`), any other folder
      that `load_dataset` reads, or the name of a dataset on the hub.

    Args:
        path: file, folder, pattern, or name on the hub.
        host: "language" or "unet", the host of the rows.
        split: as in `load_dataset`; None for a dict of all splits.
        streaming: return a stream of rows.
        columns: maps columns of a row to columns of the dataset, or "label" to a column of classes, whose names become
            the texts. In tars a column is a file extension ("jpg") or a key of a .json ("json.caption"). None if the
            dataset has the names of rows.
        template: the text for a picture with a class and no text; {label} is the class name, with spaces for hyphens
            and underscores. None for "A photo of a {label}."

    Raises:
        ConfigError: no such dataset, an unreadable file, or columns that rows do not have.
        MissingExtraError: datasets is not installed.
    """
    check_choice("host", host, tuple(COLUMNS))
    dataset = _load(os.fspath(path), split, streaming)
    is_table = Path(path).suffix in _BUILDERS

    def rows(part: Rows) -> Rows:
        part = _resolved(part, Path(path).absolute().parent) if is_table else part
        return _renamed(part, os.fspath(path), host, columns, template, strict=is_table and columns is None)

    if not isinstance(dataset, dict):
        return rows(dataset)
    return type(dataset)({name: rows(part) for name, part in dataset.items()})


def memory_kinds(dataset: Rows, host: str = "language") -> set[str]:
    """Return what the memories of rows are made of, by their columns: "pictures", "passages", "memories".

    Args:
        dataset: as `read_rows` returns it.
        host: "language" or "unet". For a UNet the column `image` is no memory, unless a row has nothing else.
    """
    kinds = {"pictures": {"image", "images", "example"}, "passages": {"passage", "passages"}, "memories": {"memory"}}
    names = set(dataset.column_names or ())
    if host == "unet" and names & {"passage", "passages", "memory"}:
        rows = dataset.select_columns(sorted(names & {"example", "passage", "passages", "memory"}))
        if not hasattr(rows, "__len__") or all(any(value for value in row.values()) for row in rows):
            kinds["pictures"] = {"example"}
    return {kind for kind, columns in kinds.items() if columns & names}


def undecoded_pictures(dataset: Rows) -> Rows:
    """Return the dataset with its pictures as they are stored, so that an error names the row of a broken one."""
    datasets = import_extra("datasets", "train")
    stored = datasets.Image(decode=False)
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image) and feature.decode:
            dataset = dataset.cast_column(name, stored)
        elif isinstance(getattr(feature, "feature", None), datasets.Image) and feature.feature.decode:
            dataset = dataset.cast_column(name, datasets.List(stored))
    return dataset


def files_of(dataset: Dataset, name: str) -> list[tuple[str, ...]]:
    """Return the files that each row names in a column; pictures that lie in the dataset itself are not read."""
    flat = dataset.select_columns(name).flatten()
    if f"{name}.path" in flat.column_names:
        # Of a picture in the dataset the path is only a name.
        return [(path,) if path and os.path.isabs(path) else () for path in flat[f"{name}.path"]]
    lists = (value if isinstance(value, list) else [value] for value in dataset[name])
    return [tuple(path for path in map(undecoded, values) if isinstance(path, str)) for values in lists]


def _load(path: str, split: str | None, streaming: bool) -> Any:
    datasets, place = import_extra("datasets", "train"), Path(path)
    options: dict[str, Any] = {"split": split, "streaming": streaming}
    tars = sorted(map(Path, glob.glob(path))) if path.endswith(".tar") else []
    try:
        if "://" in path or _is_saved(place):
            dataset = datasets.load_from_disk(path)
            if isinstance(dataset, datasets.Dataset):
                dataset = datasets.DatasetDict(train=dataset)
            if streaming:
                parts = {name: part.to_iterable_dataset() for name, part in dataset.items()}
                dataset = datasets.IterableDatasetDict(parts)
            return dataset if split is None else dataset[split]
        if tars:
            for tar in tars:
                _check_tar(tar)
            return datasets.load_dataset("webdataset", data_files=[str(tar) for tar in tars], **options)
        if place.is_file() and place.suffix in _BUILDERS:
            loaded = datasets.load_dataset(_BUILDERS[place.suffix], data_files=path, **options)
            for part in () if streaming else loaded.values() if isinstance(loaded, dict) else (loaded,):
                part.data.validate(full=True)  # texts that are not UTF-8
            return loaded
        if place.is_dir():
            pictures = sorted(file for file in map(Path, files_below(place)) if file.suffix.lower() in PICTURES)
            if any(picture.with_suffix(".txt").is_file() for picture in pictures):
                return _captioned(place, pictures, **options)
            if pictures:
                return datasets.load_dataset("imagefolder", data_dir=path, **options)
        if place.is_dir() or _is_hub_name(path):
            return datasets.load_dataset(path, **options)
    except ConfigError:
        raise
    except StopIteration:
        raise ConfigError(f"{path!r} has no rows") from None
    except (OSError, ValueError, KeyError, RuntimeError, tarfile.TarError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{path!r} cannot be read as a dataset, split {split!r}: {reason:.300}") from error
    raise ConfigError(
        f"there is no file or folder {path!r} of rows: give a {', '.join(_BUILDERS)} or .tar file, a folder, or "
        "organisation/name of a dataset on the hub"
    )


def _is_saved(place: Path) -> bool:
    return any((place / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _is_hub_name(path: str) -> bool:
    """Return True for organisation/name where the organisation is no folder."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path)) and not Path(path).parent.is_dir()


def _captioned(folder: Path, pictures: Sequence[Path], split: str | None, streaming: bool) -> Any:
    """Return pictures with the text of the .txt beside each, by the folders train, val and test if there are any."""
    datasets = import_extra("datasets", "train")
    parts: dict[str, dict[str, list[str | None]]] = {}
    for picture in pictures:
        top, text = picture.relative_to(folder).parts[0], picture.with_suffix(".txt")
        name = next((name for name, folders in SPLITS.items() if top.lower() in folders), "train")
        columns = parts.setdefault(name, {"image": [], "text": []})
        columns["image"].append(str(picture.absolute()))
        try:
            columns["text"].append(text.read_text(encoding="utf-8-sig").strip() if text.is_file() else None)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{text} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
            ) from error
    dataset = datasets.DatasetDict({name: datasets.Dataset.from_dict(columns) for name, columns in parts.items()})
    if streaming:
        dataset = datasets.IterableDatasetDict({name: part.to_iterable_dataset() for name, part in dataset.items()})
    return dataset if split is None else dataset[split]


def _check_tar(path: Path) -> None:
    """Refuse a tar that does not end after its last file: a damaged header looks like the end to tarfile."""
    with tarfile.open(path, "r:") as tar:
        members = tar.getmembers()
    ends = (file.offset_data + -(-file.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for file in members)
    last = max(ends, default=0)
    with open(path, "rb") as file:
        file.seek(last)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ConfigError(f"{path} is truncated or damaged after its byte {last:,}: fetch the file again")


def _resolved(dataset: Rows, folder: Path) -> Rows:
    """Return a table with paths that start from a folder."""
    names = [name for name in _FILES if name in (dataset.column_names or ())]

    def resolve(value: object) -> object:
        if isinstance(value, list) and value and isinstance(value[0], str):
            return [str(folder / name) for name in value]
        return str(folder / value) if isinstance(value, str) and value else value

    def row(values: dict[str, Any]) -> dict[str, Any]:
        return {name: resolve(values[name]) for name in names}

    return dataset.map(row, features=dataset.features) if names else dataset


def _renamed(
    dataset: Rows, path: str, host: str, columns: Mapping[str, str] | None, template: str | None, *, strict: bool
) -> Rows:
    """Return the dataset with the columns of a row, its pictures as they are stored."""
    datasets = import_extra("datasets", "train")
    if dataset.features is None:  # of a stream of lines
        dataset = dataset._resolve_features()
    names = list(dataset.column_names)
    allowed = (*COLUMNS[host], *ACCEPTED)
    if strict and (unknown := [name for name in names if name not in allowed]):
        raise ConfigError(f"{path}: {unknown_column(unknown[0], COLUMNS[host])}")
    chosen = dict(columns or _default_columns(dataset, names, allowed))
    _check_columns(chosen, path, host, names, allowed)
    if template is not None and "label" not in chosen:
        raise ConfigError(f"template is for classes, and {path} has texts: leave it out")
    dataset = undecoded_pictures(dataset)
    features = dict(dataset.features)
    reads = {key: _reader(key, name, features, template) for key, name in chosen.items()}
    if isinstance(dataset, datasets.Dataset):
        parts = []
        for key, name in chosen.items():
            part, read = dataset.select_columns(_column(name)), reads[key]
            part = part if _column(name) == key else part.rename_column(_column(name), key)
            parts.append(part if read is None else datasets.Dataset.from_dict({key: [read(row[key]) for row in part]}))
        rows = datasets.concatenate_datasets(parts, axis=1)
        return rows.rename_column("label", "text") if "label" in chosen else rows

    def row(values: Values) -> dict[str, Any]:
        found = {key: (values[_column(name)], reads[key]) for key, name in chosen.items()}
        return {
            "text" if key == "label" else key: value if read is None else read(value)
            for key, (value, read) in found.items()
        }

    kinds = {}
    for key, name in chosen.items():
        kind = features["json"][name.removeprefix("json.")] if name.startswith("json.") else features[name]
        kinds["text" if key == "label" else key] = datasets.Value("string") if key == "label" else kind
    return dataset.map(row, remove_columns=names, features=datasets.Features(kinds))


def _check_columns(
    chosen: Mapping[str, str], path: str, host: str, names: Sequence[str], allowed: Sequence[str]
) -> None:
    """Refuse columns that the rows of a host or the dataset do not have."""
    wrong = [f"{k}={name}" for k, name in chosen.items() if k not in (*allowed, "label") or _column(name) not in names]
    needed = {"text", "label"} if host == "language" else {"image"}
    if not wrong and needed & set(chosen) and not {"text", "label"} <= set(chosen):
        return
    if names == ["image"] and not wrong:
        raise ConfigError(
            f"the pictures of {path} have no texts: add metadata.jsonl, a .txt with the name of each picture, or a "
            "folder for each class"
        )
    fault = "both a text and a label" if {"text", "label"} <= set(chosen) else f"nothing for {min(needed)}"
    raise ConfigError(
        f"the columns of {path} are {', '.join(names)}, and the rows of this host have {', '.join(COLUMNS[host])}: "
        f"{', '.join(wrong) or fault} does not fit; give columns={{'text': NAME}}, --columns text=NAME in a command, "
        "or label instead of text for classes"
    )


def _reader(key: str, name: str, features: Mapping[str, Any], template: str | None) -> Callable[[Any], Any] | None:
    """Return the function from a value of the dataset to one of a row; None where they are equal."""
    if key != "label" and name.startswith("json."):
        return lambda values: (values or {}).get(name.removeprefix("json."))
    if key != "label":
        return (lambda text: None if text is None else text.strip()) if name == "txt" else None
    pattern, labels = TEMPLATE if template is None else template, getattr(features.get(name), "names", None)
    if "{label}" not in pattern:
        raise ConfigError(f"template={pattern!r} must have {{label}} where the name of the class belongs")

    def text(label: Any) -> str:
        if name.startswith("json."):
            label = (label or {}).get(name.removeprefix("json."))
        words = str(labels[label] if labels is not None and isinstance(label, int) else label).strip()
        return pattern.replace("{label}", words.replace("_", " ").replace("-", " "))

    return text


def _default_columns(dataset: Rows, names: Sequence[str], allowed: Sequence[str]) -> dict[str, str]:
    """Return columns named as those of a row, or by the endings of a tar's files; without a text, a label."""
    if "__key__" not in names:
        chosen = {name: name for name in allowed if name in names}
        return chosen if "text" in names or "label" not in names else {**chosen, "label": "label"}
    features: Mapping[str, Any] = dataset.features or {}
    image = next((name for name in features if f".{name}" in PICTURES), None)
    chosen = {} if image is None else {"image": image}
    if "txt" in features:
        return {**chosen, "text": "txt"}
    known = {"caption": "text"} | {name: name for name in allowed if name not in ("image", "images", "memory")}
    return chosen | {known[key]: f"json.{key}" for key in features.get("json") or () if key in known}


def _column(name: str) -> str:
    """Return the column of the dataset that "json.caption" is a key of, or the name itself."""
    return "json" if name.startswith("json.") else name
