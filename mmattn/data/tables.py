"""Tables that `DatasetRows` reads like a dataset of Hugging Face: tars of webdataset, and Lance datasets."""

from __future__ import annotations

import bisect
import glob
import hashlib
import json
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.data.folders import CAPTIONS, PICTURES, read_text
from mmattn.data.rows import KEYS
from mmattn.errors import ConfigError, import_extra


class RowTable(Sequence[Mapping[str, Any]]):
    """A table, whose rows are read when they are asked for.

    Attributes:
        described: what it is, in a word or two.
        column_names: of its columns.
        fingerprint: what tells it from another table.
    """

    described: str
    column_names: Sequence[str]
    fingerprint: str
    features = None

    def default_columns(self, host: str) -> dict[str, str]:
        """From keys of a row to columns: those of the same names."""
        return {key: key for key in KEYS[host] if key in self.column_names}

    def select(self, numbers: Sequence[int]) -> RowTable:
        """The rows of these numbers, in their order."""
        return _Selected(self, numbers)

    def select_columns(self, names: Sequence[str]) -> RowTable:
        """The same rows, of which only these columns are asked for."""
        return self


class _Selected(RowTable):
    def __init__(self, table: RowTable, numbers: Sequence[int]) -> None:
        self.table, self.numbers = table, numbers
        self.described, self.column_names = table.described, table.column_names

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return hashlib.sha256(f"{self.table.fingerprint} {list(self.numbers)}".encode()).hexdigest()

    def select_columns(self, names: Sequence[str]) -> RowTable:
        return _Selected(self.table.select_columns(names), self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        return self.table[self.numbers[number]]


class LanceTable(RowTable):
    """The rows of a Lance dataset, on this machine or at an address.

    Args:
        path: of the dataset, or an address that Lance reads.
        columns: that are read; None for all.

    Raises:
        ConfigError: there is no such dataset.
        MissingExtraError: lance is not installed.
    """

    described = "a Lance dataset"

    def __init__(self, path: str, columns: Sequence[str] | None = None) -> None:
        lance = import_extra("lance", "lance")
        try:
            self.dataset = lance.dataset(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path!r} cannot be read as a Lance dataset: {' '.join(str(error).split())[:300]}"
            ) from error
        self.path, self.columns = path, columns
        self.column_names = list(self.dataset.schema.names)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """A fingerprint of the version of the dataset."""
        return hashlib.sha256(f"lance {self.path} {self.dataset.version} {len(self)}".encode()).hexdigest()

    def select_columns(self, names: Sequence[str]) -> LanceTable:
        """The same rows, of which only these columns are read."""
        return LanceTable(self.path, names)

    def __len__(self) -> int:
        return int(self.dataset.count_rows())

    def __getitem__(self, number: Any) -> Any:
        (row,) = self.dataset.take([range(len(self))[number]], columns=self.columns).to_pylist()
        return row


def is_lance(path: str) -> bool:
    """Return True for a folder with versions of Lance, and for an address that ends in .lance."""
    return os.path.isdir(Path(path) / "_versions") or path.rstrip("/").endswith(".lance")


TEXTS = frozenset({"txt", "text", "caption", "transcript", "cls"})
# A sample's files have one name up to the first point.
_NAME = re.compile(r"(?P<key>(?:.*/)?(?!__)[^./][^./]*)\.(?P<ending>[^/]+)")


class TarSamples(RowTable):
    """The samples of tar files as a table, with a column for each ending.

    Files that end in .txt, .text, .caption, .transcript or .cls are texts, those in .json are parsed, and all others
    are bytes. "json.caption" is a key of the object in a .json, and "jpg;png" the first of these that a sample has.

    Args:
        paths: of the tars, in order.

    Attributes:
        column_names: the endings there are, and the keys of the first sample's .json.

    Raises:
        ConfigError: a tar that is damaged, has no samples, or a sample that has two files of one ending.
    """

    described = "webdataset tars"

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._offsets, self._sizes, self._endings = array("q"), array("q"), array("H")
        # The first file of each sample, and the number of samples up to the end of each tar.
        self._starts, self._ends = array("q"), list[int]()
        self._names: dict[str, int] = {}
        for path in self.paths:
            self._add(path)
            self._ends.append(len(self._starts))
        if not self._starts:
            raise ConfigError(f"{self.paths[0]} holds no samples: files such as 000017.jpg and 000017.txt")
        first = self[0]["json"]
        keys = [f"json.{key}" for key in first] if isinstance(first, dict) else []
        self.column_names = [*self._names, *keys]

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """A fingerprint of the names and sizes of the tars."""
        about = [(path.name, path.stat().st_size) for path in self.paths]
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def default_columns(self, host: str) -> dict[str, str]:
        """From keys of a row to columns: the pictures, and a text or the keys of a .json."""
        pictures = [name for name in self._names if f".{name}" in PICTURES]
        found = {"image": ";".join(pictures)} if pictures else {}
        texts = [name for name in self._names if name in TEXTS - {"cls"}]
        if texts:
            return found | {"text": texts[0]}
        keys = [name.removeprefix("json.") for name in self.column_names if name.startswith("json.")]
        named = {"caption": "text"} | {key: key for key in KEYS[host] if key not in ("image", "images", "memory")}
        return found | {named[key]: f"json.{key}" for key in keys if key in named}

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]
        start = self._starts[number]
        end = self._starts[number + 1] if number + 1 < len(self) else len(self._offsets)
        path, names = self.paths[bisect.bisect_right(self._ends, number)], list(self._names)
        return _Sample(path, {names[self._endings[i]]: (self._offsets[i], self._sizes[i]) for i in range(start, end)})

    def _add(self, path: Path) -> None:
        """Find the samples of a tar."""
        last, seen, end = None, set[str](), 0
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    name = _NAME.fullmatch(member.name)
                    if name is None or not member.isreg():
                        continue
                    key, ending = name["key"], name["ending"].lower()
                    if key != last:
                        last, seen = key, set()
                        self._starts.append(len(self._offsets))
                    if ending in seen:
                        raise ConfigError(f"{path} has two files {key}.{ending} in one sample")
                    seen.add(ending)
                    self._offsets.append(member.offset_data)
                    self._sizes.append(member.size)
                    self._endings.append(self._names.setdefault(ending, len(self._names)))
        except (tarfile.TarError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as a tar that is not compressed: {error}") from error
        with open(path, "rb") as file:
            file.seek(end)
            # A damaged header looks like the end to tarfile.
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ConfigError(f"{path} is truncated or damaged after its byte {end:,} (after {last})")


class _Sample(Mapping[str, Any]):
    """The files of a sample, read when they are asked for; None for those that it does not have."""

    def __init__(self, path: Path, files: Mapping[str, tuple[int, int]]) -> None:
        self.path, self.files = path, files

    def __getitem__(self, column: str) -> Any:
        ending = next((name for name in column.split(";") if name in self.files), None)
        if ending is None and column.startswith("json."):
            about = self["json"]
            return about.get(column.removeprefix("json.")) if isinstance(about, dict) else None
        if ending is None:
            return None
        offset, size = self.files[ending]
        with open(self.path, "rb") as file:
            file.seek(offset)
            raw = file.read(size)
        if ending in TEXTS:
            return read_text(raw).strip()
        return _parsed(raw) if ending == "json" else raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def tar_files(path: str) -> list[Path]:
    """The tars that a path stands for, in order; none where it stands for something else."""
    place = Path(path)
    if place.is_file():
        return [place] if place.suffix == ".tar" else []
    if place.is_dir():
        return _tars_in(place)
    if not path.endswith(".tar"):
        return []
    found = [Path(one) for each in _expanded(path) for one in sorted(glob.glob(each) or [each])]
    missing = [one for one in found if not one.is_file()]
    if missing:
        raise ConfigError(f"there is no file {missing[0]} ({len(missing)} of the {len(found)} that {path} stands for)")
    return found


def _tars_in(folder: Path) -> list[Path]:
    """Return the tars in a folder; none where it has folders, pictures or captions, too."""
    names = [one for one in folder.iterdir() if not one.name.startswith(".")]
    others = any(one.is_dir() or one.suffix.lower() in PICTURES or one.name in CAPTIONS for one in names)
    return [] if others else sorted(one for one in names if one.suffix == ".tar")


def _expanded(pattern: str) -> list[str]:
    """The names that "{00000..00117}" and "{train,val}" in a pattern stand for."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    inner = braces[1].split(",")
    if span is not None:
        first, last = int(span[1]), int(span[2])
        inner = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
    return [one for each in inner for one in _expanded(pattern[: braces.start()] + each + pattern[braces.end() :])]


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(read_text(raw))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"its .json is none: {error}") from error
