"""Rows from files of JSON lines and from folders of pictures, whose layout is detected."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mmattn.data.row import Row, make_row, text_of_label
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.files import files_below
from mmattn.storage.json_files import parse_json

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
CAPTIONS = ("captions.jsonl", "metadata.jsonl")
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# Kinds of pictures and films that cameras write and Pillow does not read.
_UNREAD = frozenset({".heic", ".heif", ".avif", ".dng", ".cr2", ".nef", ".mov", ".mp4"})
_OTHER_NAMES = {"file": "image", "file_name": "image", "caption": "text"}
_SHOWN = 10
_MAX_LINE = 256 << 20


def read_folder(
    path: str | Path,
    host: str = "language",
    *,
    split: str | None = None,
    template: str | None = None,
    skip_broken: bool = False,
) -> FileRows:
    """Read the rows of a folder of pictures, in the layout that is found there.

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
    folder = _split_folder(Path(path), split)
    files = sorted(map(Path, files_below(folder)))
    pictures = [file for file in files if file.suffix.lower() in PICTURES]
    captions = _source_of_texts(folder, pictures, template)
    if captions.endswith(".jsonl"):
        return _captioned(folder / captions, host, pictures, skip_broken)
    if not pictures:
        raise ConfigError(f"{folder} holds no pictures; they end in {', '.join(sorted(PICTURES))}")
    unread = [file.suffix.lower() for file in files if file.suffix.lower() in _UNREAD]
    kinds = ", ".join(sorted(set(unread)))
    other = f"; {_count(len(unread), 'file')} of a kind that is not read ({kinds})" if unread else ""
    if captions:
        return _texts_beside(folder, host, pictures, skip_broken, other)
    return _classes(folder, host, pictures, template, skip_broken, other)


def _source_of_texts(folder: Path, pictures: Sequence[Path], template: str | None) -> str:
    """Return the file of captions, ".txt" for one beside each picture, or "" for class folders."""
    beside = [file for file in pictures if file.with_suffix(".txt").is_file()]
    captions = [name for name in CAPTIONS if (folder / name).is_file()]
    texts = captions + [f"a .txt beside {len(beside)} of {len(pictures)} pictures"] * bool(beside)
    if len(texts) > 1:
        raise ConfigError(f"{folder} has {' and '.join(texts)}: texts can come from one of them; remove the others")
    if texts and template is not None:
        raise ConfigError(
            f"template is for class folders, and the texts of {folder} come from {texts[0]}: leave it out"
        )
    if captions or not beside:
        return "".join(captions)
    if len(beside) < len(pictures) and any(file.parent != folder for file in pictures):
        raise ConfigError(
            f"{len(beside)} of the {len(pictures)} pictures in {folder} have a .txt beside them, and others lie in "
            "folders without one: give each a .txt, or none"
        )
    return ".txt"


def _split_folder(folder: Path, split: str | None) -> Path:
    """Return the folder of a split; the folder itself if it has none."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    splits = split_folders(folder)
    if not splits and split is None:
        return folder
    if not splits:
        raise ConfigError(f"the split {split!r} is asked for, and {folder} has no folders train, val or test")
    chosen = next((kind for kind, names in SPLITS.items() if split in (kind, *names)), split or "train")
    if chosen not in splits:
        names = ", ".join(one.name for one in splits.values())
        raise ConfigError(f"there is no split {split or 'train'!r} in {folder}; there is: {names}")
    return splits[chosen]


def split_folders(folder: Path) -> dict[str, Path]:
    """Return the folders train, validation and test of a folder without other folders, or nothing."""
    if any((folder / name).is_file() for name in CAPTIONS):
        return {}
    splits: dict[str, Path] = {}
    for sub in _subfolders(folder):
        kind = next((kind for kind, names in SPLITS.items() if sub.name.lower() in names), None)
        if kind is None:
            return {}
        if kind in splits:
            raise ConfigError(f"{folder} has two folders for the {kind} rows, {splits[kind].name} and {sub.name}")
        splits[kind] = sub
    if splits and "train" not in splits:
        raise ConfigError(f"{folder} holds {', '.join(one.name for one in splits.values())} and no folder train")
    return splits


def _captioned(path: Path, host: str, pictures: Sequence[Path], skip_broken: bool) -> FileRows:
    rows = read_lines(path, host, skip_broken=skip_broken)
    named = {os.path.realpath(str(image)) for row in rows for image in (*row.images, row.picture) if image}
    silent = sum(os.path.realpath(file) not in named for file in pictures)
    more = f"; {_count(silent, 'other picture')} in the folder {'has' if silent == 1 else 'have'} no line there"
    return FileRows(rows, f"{_count(len(rows), 'text')} in {path.name}{more if silent else ''}", rows.left_out)


def _texts_beside(folder: Path, host: str, pictures: Sequence[Path], skip_broken: bool, other: str) -> FileRows:
    rows: list[Row] = []
    problems: list[str] = []
    for picture in pictures:
        text = picture.with_suffix(".txt")
        try:
            rows.append(make_row({"image": str(picture), "text": read_text(text.read_bytes()).strip()}, host))
        except FileNotFoundError:
            problems.append(f"{picture.relative_to(folder)}: no {text.name} beside it")
        except ConfigError as error:
            problems.append(f"{text.relative_to(folder)}: {error}")
    left_out = without_broken(folder, "pictures", problems, len(pictures), skip_broken)
    return FileRows(rows, f"{_count(len(pictures), 'picture')} with a .txt beside each{other}", left_out)


def _classes(
    folder: Path, host: str, pictures: Sequence[Path], template: str | None, skip_broken: bool, other: str
) -> FileRows:
    loose = [file.name for file in pictures if file.parent == folder]
    deep = next((file for file in pictures if file.parent.parent != folder), None)
    classes, full = _subfolders(folder), {file.parent for file in pictures}
    fault = None
    if len(loose) == len(pictures):
        fault = (
            f"holds {_count(len(pictures), 'picture')} and no texts for them; texts are given as a folder for each "
            "class, captions.jsonl, metadata.jsonl, or a .txt beside each"
        )
    elif loose:
        fault = f"holds pictures beside its class folders ({', '.join(loose[:3])}): move each into its class"
    elif deep is not None:
        fault = (
            f"is not a folder of class folders: {deep.relative_to(folder)} lies in a folder within a folder; give the "
            "folder that holds the class folders"
        )
    elif len(full) < 2 and host == "language":
        fault = (
            f"holds one class folder ({pictures[0].parent.name}), so every picture would have the same text; give the "
            "folder that holds the folders of all classes"
        )
    if fault is not None:
        raise ConfigError(f"{folder} {fault}")
    problems = [f"{sub.name}: a class folder without pictures" for sub in classes if sub not in full]
    left_out = without_broken(folder, "class folders", problems, len(classes), skip_broken)
    rows = []
    for picture in pictures:
        label = picture.parent.name.replace("_", " ").replace("-", " ")
        rows.append(make_row({"image": str(picture), "text": text_of_label(label, template)}, host))
    return FileRows(rows, f"{_count(len(rows), 'picture')} in {_count(len(full), 'class folder')}{other}", left_out)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith((".", "__")))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


class FileRows(list[Row]):
    """Rows of a file or folder, with a `summary` in one line, and in `left_out` what could not be used, and why."""

    def __init__(self, rows: Iterable[Row], summary: str, left_out: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.summary, self.left_out = summary, tuple(left_out)


def read_lines(path: str | Path, host: str = "language", *, skip_broken: bool = False) -> FileRows:
    """Read the rows of a file of JSON lines in UTF-8, with or without a byte-order mark. Empty lines are passed over.

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
    named = path.name in CAPTIONS
    rows, problems, number, count = [], [], 0, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            count += bool(line.strip())
            try:
                text = read_text(line).strip()
                if text:
                    values = parse_json("the line", text.encode(), _MAX_LINE)
                    if not isinstance(values, Mapping):
                        raise ConfigError(f"an object {{…}} is expected, got {type(values).__name__}")
                    rows.append(make_row(_renamed(values) if named else values, host, path.parent))
            except (ConfigError, AdapterFileError) as error:
                problems.append(f"line {number}: {error}")
    if not rows and not problems:
        raise ConfigError(f"{path} has no rows ({number} lines, all of them empty)")
    left_out = without_broken(path, "lines", problems, count, skip_broken)
    return FileRows(rows, f"{len(rows)} rows of {path.name}", [f"{path.name}, {problem}" for problem in left_out])


def _renamed(values: Mapping[str, object]) -> dict[str, object]:
    # The vision recipe writes the species down, too.
    return {_OTHER_NAMES.get(key, key): value for key, value in values.items() if key != "species"}


def without_broken(where: Path, what: str, problems: Sequence[str], total: int, skip_broken: bool) -> Sequence[str]:
    """Return the problems, if what has them may be left out."""
    if problems and (len(problems) >= total or not skip_broken):
        raise ConfigError(f"{len(problems)} of {total} {what} of {where} cannot be used:\n{first_few(problems)}")
    return problems


def first_few(problems: Sequence[str]) -> str:
    """Return the first ten, a line each, and how many there are besides."""
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "  " + "\n  ".join(problems[:_SHOWN]) + more


def read_text(raw: bytes) -> str:
    """Decode UTF-8 with or without a byte-order mark, and with any line ends."""
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"not UTF-8 ({error.reason} at byte {error.start}): if it is UTF-16 or UTF-32, save it as UTF-8"
        ) from error
    if "\0" in text:
        raise ConfigError("a NUL in it: UTF-16, or not text; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
