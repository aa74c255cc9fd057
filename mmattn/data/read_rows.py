"""Rows of whatever a path names: a file, a folder, tars, a dataset, encoded rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.data.datasets import ROW_KEY, DatasetRows, StreamRows
from mmattn.data.encoded_dataset import EncodedDataset, is_encoded
from mmattn.data.folders import read_folder
from mmattn.data.jsonl import FileRows, read_lines
from mmattn.data.lance import LanceTable, is_lance
from mmattn.data.rows import KEYS
from mmattn.data.webdataset import TarSamples, tar_files
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
        The rows, whose `found` says in one line what they are.

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
        chosen = _chosen_columns(path, table.column_names, table.default_columns(host), columns, host)
        if template is not None and "label" not in chosen:
            _refuse(path, template=template)
        return DatasetRows(table, chosen, host, template)
    if place.is_file():
        _refuse(path, split=split, streaming=streaming, columns=columns, template=template)
        return read_lines(place, host, skip_broken=skip_broken)
    saved = is_saved(place)
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
    chosen = _chosen_columns(path, names, _columns(names, host), columns, host)
    if template is not None and "label" not in chosen:
        _refuse(path, template=template)
    dataset = _undecoded(dataset, chosen)
    if streaming:
        return StreamRows(dataset, chosen, host, template=template)
    return DatasetRows(dataset, chosen, host, template)


def _chosen_columns(
    path: str, names: Sequence[str], own: Mapping[str, str], columns: Mapping[str, str] | None, host: str
) -> dict[str, str]:
    """From keys of a row to columns, checked."""
    chosen = dict(columns) if columns else dict(own)
    known = {column: any(part in names for part in column.split(";")) for column in chosen.values()}
    wrong = {key: name for key, name in chosen.items() if key not in (*KEYS[host], "label") or not known[name]}
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
    return chosen


def is_saved(place: Path) -> bool:
    """Whether a folder is one that `datasets` saved."""
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
