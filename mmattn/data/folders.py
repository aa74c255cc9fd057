"""Rows from files of JSON lines and from folders of pictures, whose layout is detected."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmattn.data.rows import Row, make_row, text_of_label
from mmattn.errors import ConfigError

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
CAPTIONS = {"captions.jsonl": '{"file", "caption"}', "metadata.jsonl": '{"file_name", "text"}'}
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_LAYOUTS = (
    "a folder for each class, `captions.jsonl` or `metadata.jsonl`, or a .txt of the same name beside each picture"
)
# Kinds of pictures and films that cameras write and Pillow does not read.
_UNREAD = frozenset({".heic", ".heif", ".avif", ".dng", ".cr2", ".nef", ".mov", ".mp4"})


def read_folder(
    path: str | Path,
    host: str = "language",
    *,
    split: str | None = None,
    template: str | None = None,
    skip_broken: bool = False,
) -> FileRows:
    """The rows of a folder of pictures, in the layout that is found there.

    - Class folders, as `torchvision.datasets.ImageFolder` has them (`daisy/1.jpg`): the text is made of the name of the
      class by a template.
    - `captions.jsonl` with lines {"file", "caption"}, or `metadata.jsonl` with lines {"file_name", "text"}, as the
      image folders of Hugging Face; both may have the other keys of a row.
    - A `.txt` of the same name beside each picture.

    Each may lie in folders `train`, `val` and `test` (or the other names in `SPLITS`). Texts are in UTF-8, with or
    without a byte-order mark.

    Args:
        path: of the folder.
        host: "language" or "unet": what the rows are for.
        split: which of the split folders to read; None for "train".
        template: the text of a picture in a class folder, with {label} where the name of the class belongs, whose
            hyphens and underscores become spaces; None for "A photo of a {label}."
        skip_broken: leave out pictures and lines that cannot be used, and name them in `left_out` of the result.

    Raises:
        ConfigError: no such folder, none of these layouts or more than one, no such split, a template for another
            layout, or pictures and lines that cannot be used.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    splits = split_folders(folder)
    if split is not None and not splits:
        raise ConfigError(
            f"the split {split!r} is asked for, and {folder} has no folders train, val or test: leave it out"
        )
    if splits:
        wanted = next((kind for kind, names in SPLITS.items() if split in (kind, *names)), split or "train")
        if wanted not in splits:
            had = ", ".join(one.name for one in splits.values())
            raise ConfigError(f"there is no split {split or 'train'!r} in {folder}; there is: {had}")
        folder = splits[wanted]
    return _Folder(folder, host, template, skip_broken).rows()


def split_folders(folder: Path) -> dict[str, Path]:
    """Return the folders train, validation and test of a folder without other folders, or nothing."""
    if any((folder / name).is_file() for name in CAPTIONS):
        return {}
    found: dict[str, Path] = {}
    for sub in _subfolders(folder):
        kind = next((kind for kind, names in SPLITS.items() if sub.name.lower() in names), None)
        if kind is None:
            return {}
        if kind in found:
            raise ConfigError(f"{folder} has two folders for the {kind} rows, {found[kind].name} and {sub.name}")
        found[kind] = sub
    if found and "train" not in found:
        raise ConfigError(f"{folder} holds {', '.join(one.name for one in found.values())} and no folder train")
    return found


@dataclass(frozen=True)
class _Folder:
    """One folder without splits, and how its pictures become rows."""

    folder: Path
    host: str
    template: str | None
    skip_broken: bool

    def rows(self) -> FileRows:
        files = sorted(_walk(self.folder))
        pictures = [file for file in files if file.suffix.lower() in PICTURES]
        captions = self._caption_files()
        beside = {file for file in pictures if file.with_suffix(".txt").is_file()}
        texts = captions + [f"a .txt beside {len(beside)} of {len(pictures)} pictures"] * bool(beside)
        if len(texts) > 1:
            raise ConfigError(
                f"{self.folder} has {' and '.join(texts)}: texts can come from one of them; remove the others"
            )
        if captions:
            return self._captions(captions[0], pictures)
        if not pictures:
            raise ConfigError(f"{self.folder} holds no pictures; they end in {', '.join(sorted(PICTURES))}")
        other = _unread_files(files)
        depths = {len(file.relative_to(self.folder).parts) for file in pictures}
        if not beside:
            return self._classes(pictures, depths, other)
        if depths != {1} and len(beside) < len(pictures):
            raise ConfigError(
                f"{len(beside)} of the {len(pictures)} pictures in {self.folder} have a .txt beside them, and others "
                "lie in folders without one: give each a .txt, or none, so that the folders are their classes"
            )
        return self._beside(pictures, beside, other)

    def _caption_files(self) -> list[str]:
        names = [name for name in CAPTIONS if (self.folder / name).is_file()]
        if (self.folder / "metadata.csv").is_file() and not names:
            raise ConfigError(f"{self.folder} has a metadata.csv: write it as metadata.jsonl, a JSON object a line")
        return names

    def _captions(self, name: str, pictures: Sequence[Path]) -> FileRows:
        self._refuse_template(name)
        rows = read_lines(self.folder / name, self.host, skip_broken=self.skip_broken)
        named = {os.path.realpath(image) for row in rows for image in (*row.images, row.picture) if image}
        silent = sum(os.path.realpath(file) not in named for file in pictures)
        more = f"; {_count(silent, 'other picture')} in the folder {'has' if silent == 1 else 'have'} no line there"
        summary = f"{_count(len(rows), 'text')} in {name}{more if silent else ''}"
        return FileRows(rows, summary, rows.left_out)

    def _beside(self, pictures: Sequence[Path], beside: set[Path], other: str) -> FileRows:
        self._refuse_template("a .txt beside each picture")
        rows: list[Row] = []
        problems: list[str] = []
        for picture in pictures:
            name = picture.relative_to(self.folder)
            if picture not in beside:
                problems.append(f"{name}: no {picture.stem}.txt beside it")
                continue
            try:
                text = read_text(picture.with_suffix(".txt").read_bytes()).strip()
                rows.append(make_row({"image": str(picture), "text": text}, self.host))
            except ConfigError as error:
                problems.append(f"{name.with_suffix('.txt')}: {error}")
        left_out = without_broken(self.folder, "pictures", problems, len(pictures), self.skip_broken)
        return FileRows(rows, f"{_count(len(pictures), 'picture')} with a .txt beside each{other}", left_out)

    def _classes(self, pictures: Sequence[Path], depths: set[int], other: str) -> FileRows:
        folder = self.folder
        if depths == {1}:
            raise ConfigError(
                f"{folder} holds {_count(len(pictures), 'picture')} and no texts for them; texts are given as "
                f"{_LAYOUTS}"
            )
        if 1 in depths:
            loose = [file.name for file in pictures if file.parent == folder]
            raise ConfigError(
                f"{folder} holds pictures beside its class folders ({', '.join(loose[:3])}): move each into the folder "
                "of its class"
            )
        if depths != {2}:
            deep = next(file for file in pictures if len(file.relative_to(folder).parts) != 2)
            raise ConfigError(
                f"{deep.relative_to(folder)} lies in a folder within a folder of {folder}: class folders hold pictures "
                "only, so that the name of the class is clear; give data.path the folder that holds the class folders"
            )
        classes = _subfolders(folder)
        empty = [sub.name for sub in classes if not any(file.parent == sub for file in pictures)]
        if len(classes) - len(empty) < 2 and self.host == "language":
            raise ConfigError(
                f"{folder} holds one class folder ({pictures[0].parent.name}), so every picture would have the same "
                "text; give the folder that holds the folders of all classes"
            )
        problems = [f"{name}: a class folder without pictures" for name in empty]
        left_out = without_broken(folder, "class folders", problems, len(classes), self.skip_broken)
        rows = []
        for picture in pictures:
            label = picture.parent.name.replace("_", " ").replace("-", " ")
            rows.append(make_row({"image": str(picture), "text": text_of_label(label, self.template)}, self.host))
        summary = f"{_count(len(rows), 'picture')} in {_count(len(classes) - len(empty), 'class folder')}{other}"
        return FileRows(rows, summary, left_out)

    def _refuse_template(self, layout: str) -> None:
        if self.template is not None:
            raise ConfigError(
                f"template is for class folders, and the texts of {self.folder} come from {layout}: leave it out"
            )


def _unread_files(files: Sequence[Path]) -> str:
    """Describe pictures and films of kinds that are not read."""
    unread = sorted({file.suffix.lower() for file in files} & _UNREAD)
    count = sum(file.suffix.lower() in unread for file in files)
    return f"; {_count(count, 'file')} of a kind that is not read ({', '.join(unread)})" if unread else ""


def _walk(folder: Path) -> list[Path]:
    """Every file, those in hidden folders and what macOS leaves behind aside."""
    found = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _hidden(name)]
        found += [Path(place) / name for name in files if not _hidden(name)]
    return found


def _subfolders(folder: Path) -> list[Path]:
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not _hidden(sub.name))


def _hidden(name: str) -> bool:
    return name.startswith((".", "__"))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


_OTHER_NAMES = {"file": "image", "file_name": "image", "caption": "text"}
_SHOWN = 10
# The marks of UTF-32 first: one of them begins with one of UTF-16.
_WIDE = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class FileRows(list[Row]):
    """Rows of a file or folder.

    Args:
        rows: in order.
        summary: one line that describes them: "180 pictures in 12 class folders".
        left_out: what could not be used, and why.
    """

    def __init__(self, rows: Iterable[Row], summary: str, left_out: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.summary, self.left_out = summary, tuple(left_out)


def read_lines(path: str | Path, host: str = "language", *, skip_broken: bool = False) -> FileRows:
    """The rows of a file of JSON lines in UTF-8, with or without a byte-order mark. Empty lines are passed over.

    In files of the names `captions.jsonl` and `metadata.jsonl`, "file" and "file_name" stand for "image" and "caption"
    for "text".

    Args:
        path: of the file; relative paths in it start from its folder.
        host: "language" or "unet": what the rows are for.
        skip_broken: leave out lines that cannot be used, and name them in `left_out` of the result.

    Raises:
        ConfigError: no such file, no rows, or lines that are none; the first ten are named with their numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    renamed = path.name in ("captions.jsonl", "metadata.jsonl")
    rows, problems, number, seen = [], [], 0, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and (encoding := _wide_encoding(line)):
                raise ConfigError(f"{path} is in {encoding}: save it as UTF-8")
            seen += bool(line.strip())
            try:
                text = read_text(line).strip()
                if text:
                    values = _object(text)
                    rows.append(make_row(_renamed(values) if renamed else values, host, path.parent))
            except json.JSONDecodeError as error:
                problems.append(f"line {number}: not JSON ({error.msg} at character {error.pos + 1})")
            except (ConfigError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
    if not rows and not problems:
        raise ConfigError(f"{path} has no rows ({number} lines, all of them empty)")
    left_out = without_broken(path, "lines", problems, seen, skip_broken)
    return FileRows(rows, f"{len(rows)} rows of {path.name}", [f"{path.name}, {problem}" for problem in left_out])


def without_broken(where: Path, what: str, problems: Sequence[str], total: int, skip_broken: bool) -> Sequence[str]:
    """The problems, if what has them may be left out."""
    if problems and (len(problems) == total or not skip_broken):
        raise ConfigError(f"{len(problems)} of {total} {what} of {where} cannot be used:\n{first_few(problems)}")
    return problems


def first_few(problems: Sequence[str]) -> str:
    """The first ten, a line each, and how many there are besides."""
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "  " + "\n  ".join(problems[:_SHOWN]) + more


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    # The vision recipe writes the species down, too.
    return {_OTHER_NAMES.get(key, key): value for key, value in given.items() if key != "species"}


def _object(text: str) -> dict[str, Any]:
    given = json.loads(text, object_pairs_hook=_without_doubles)
    if not isinstance(given, dict):
        raise ConfigError(f"an object {{…}} is expected, got {type(given).__name__}")
    return given


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the key {name!r} stands there twice")
    return dict(pairs)


def read_text(raw: bytes) -> str:
    """UTF-8 with or without a byte-order mark, and with any line ends."""
    if encoding := _wide_encoding(raw):
        raise ConfigError(f"{encoding} instead of UTF-8: save it as UTF-8")
    if b"\0" in raw:
        raise ConfigError(f"a NUL at byte {raw.index(0) + 1}: UTF-16, or not text; save it as UTF-8")
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _wide_encoding(raw: bytes) -> str | None:
    """The encoding that the byte-order mark of UTF-16 or UTF-32 names."""
    for mark, encoding in _WIDE.items():
        if raw.startswith(mark):
            return encoding
    return None
