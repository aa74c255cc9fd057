"""A corpus as lines of files: JSON lines or plain text, cut into stretches that can be read one by one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmattn.errors import AdapterFileError, ConfigError, IndexMismatchError, TextError
from mmattn.storage.file_kinds import parse_json

MAX_LINE = 16 << 20
_JSON_LINES = (".jsonl", ".ndjson")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One line: its id, its text, and whatever else the line holds."""

    id: str
    text: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Stretch:
    """Lines of one file: its number, the first line (from 1), its place in bytes, how many lines, and their sha256."""

    file: int
    first: int
    offset: int
    count: int
    sha256: str


@dataclass(frozen=True)
class LineFiles:
    """Files of one text per line: .jsonl and .ndjson hold JSON objects, all others the text itself. Blank lines count
    as lines and hold nothing.

    Args:
        files: paths, whose names differ.
        field: of a JSON object, what holds the text.
        id_field: of a JSON object, what names it (text or a whole number); None names a line "file name:number".
    """

    files: tuple[Path, ...]
    field: str
    id_field: str | None

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if not names:
            raise ConfigError("a corpus needs at least one file, got none")
        double = next((name for name in names if names.count(name) > 1), None)
        if double:
            raise ConfigError(f"two files of the corpus are called {double!r}, so their lines could not be told apart")
        missing = next((file for file in self.files if not file.is_file()), None)
        if missing:
            raise AdapterFileError(f"the corpus has no file {str(missing)!r}: there is no such file")

    def survey(self, size: int) -> tuple[list[Stretch], dict[str, str], list[str]]:
        """Stretches of `size` lines, the sha256 of each file by name, and what is wrong with which lines."""
        stretches: list[Stretch] = []
        hashes, faults = {}, []
        for number, path in enumerate(self.files):
            whole = hashlib.sha256()
            first, offset = 1, 0
            with open(path, "rb") as file:
                while raws := list(itertools.islice(file, size)):
                    joined = b"".join(raws)
                    whole.update(joined)
                    digest = hashlib.sha256(joined).hexdigest()
                    stretches.append(Stretch(number, first, offset, len(raws), digest))
                    for line, raw in enumerate(raws, first):
                        try:
                            self._row(path, line, raw)
                        except TextError as error:
                            faults.append(str(error))
                    first, offset = first + len(raws), offset + len(joined)
            hashes[path.name] = whole.hexdigest()
        return stretches, hashes, faults

    def rows(self, stretch: Stretch) -> Iterator[Row]:
        """The rows of a stretch; broken lines are left out.

        Raises:
            IndexMismatchError: the lines are not those of the survey.
        """
        path = self.files[stretch.file]
        with open(path, "rb") as file:
            file.seek(stretch.offset)
            raws = list(itertools.islice(file, stretch.count))
        if hashlib.sha256(b"".join(raws)).hexdigest() != stretch.sha256:
            raise IndexMismatchError(f"{str(path)!r} was changed while it was embedded; begin anew in another folder")
        for line, raw in enumerate(raws, stretch.first):
            with contextlib.suppress(TextError):
                row = self._row(path, line, raw)
                if row is not None:
                    yield row

    def _row(self, path: Path, line: int, raw: bytes) -> Row | None:
        """The row in a line, None of a blank one; TextError says what is wrong and where."""
        place = f"{path.name}:{line}"
        raw = raw.removeprefix(_BOM) if line == 1 else raw
        if not raw.strip():
            return None
        try:
            decoded = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise TextError(f"{place} is not UTF-8 ({error.reason} at byte {error.start})") from error
        if path.suffix.lower() not in _JSON_LINES:
            return Row(place, decoded, {})
        try:
            value = parse_json(place, raw, MAX_LINE)
        except AdapterFileError as error:
            raise TextError(str(error)) from error
        if not isinstance(value, dict):
            raise TextError(f"{place} holds no JSON object but {type(value).__name__}")
        named = place if self.id_field is None else value.pop(self.id_field, None)
        if isinstance(named, bool) or not isinstance(named, (str, int)):
            raise TextError(f"{place} has no text or whole number in its field {self.id_field!r}, got {named!r:.40}")
        text = value.pop(self.field, None)
        if not isinstance(text, str) or not text.strip():
            raise TextError(f"{place} has no text in its field {self.field!r}, got {text!r:.40}")
        return Row(str(named), text, value)
