"""A corpus as lines of files: JSON lines or plain text, cut into stretches that can be read one by one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mmattn.errors import AdapterFileError, ConfigError, IndexMismatchError, TextError
from mmattn.storage.json_files import parse_json

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
class Survey:
    """What the files hold: stretches of lines, the sha256 of each file by name, what is wrong with which lines, and how
    many lines have a text."""

    stretches: list[Stretch]
    hashes: dict[str, str]
    faults: list[str]
    rows: int


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

    def survey(self, size: int) -> Survey:
        """Every line read and checked once.

        Args:
            size: lines of a stretch.
        """
        stretches: list[Stretch] = []
        hashes, faults, rows = {}, [], 0
        for number, path in enumerate(self.files):
            whole = hashlib.sha256()
            line = 1
            with open(path, "rb") as file:
                while True:
                    first, offset, digest = line, file.tell(), hashlib.sha256()
                    for raw in _lines(file, size, digest, whole):
                        try:
                            rows += self._row(path, line, raw) is not None
                        except TextError as error:
                            faults.append(str(error))
                        line += 1
                    if line == first:
                        break
                    stretches.append(Stretch(number, first, offset, line - first, digest.hexdigest()))
            hashes[path.name] = whole.hexdigest()
        return Survey(stretches, hashes, faults, rows)

    def rows(self, stretch: Stretch) -> Iterator[Row]:
        """The rows of a stretch; broken lines are left out.

        Args:
            stretch: one of those of the survey.

        Raises:
            IndexMismatchError: the lines are not those of the survey.
        """
        path, digest = self.files[stretch.file], hashlib.sha256()
        with open(path, "rb") as file:
            file.seek(stretch.offset)
            raws = list(_lines(file, stretch.count, digest))
        if digest.hexdigest() != stretch.sha256:
            raise IndexMismatchError(f"{str(path)!r} was changed while it was embedded; begin anew in another folder")
        for line, raw in enumerate(raws, stretch.first):
            with contextlib.suppress(TextError):
                row = self._row(path, line, raw)
                if row is not None:
                    yield row

    def _row(self, path: Path, line: int, raw: bytes) -> Row | None:
        """The row in a line, None of a blank one; TextError says what is wrong and where."""
        place = f"{path.name}:{line}"
        raw = raw.removeprefix(_BOM)  # in any line: files are joined, each with its own
        if len(raw) > MAX_LINE:
            raise TextError(f"{place} has more than {MAX_LINE:,} bytes; cut it into lines, or into chunks")
        if not raw.strip():
            return None
        if b"\0" in raw:
            raise TextError(
                f"{place} has NUL characters, which text in UTF-8 has not; if it is UTF-16, convert the file"
            )
        try:
            decoded = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise TextError(f"{place} is not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
        if path.suffix.lower() not in _JSON_LINES:
            if "\r" in decoded:
                raise TextError(
                    f"{place} has a carriage return within it; lines end with a line feed, with or without one"
                )
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


def _lines(file: IO[bytes], count: int, *digests: Any) -> Iterator[bytes]:
    """The next lines of a file, of those that are too long the first bytes; all bytes go into the digests."""
    for _ in range(count):
        raw = piece = file.readline(MAX_LINE + 1)
        if not raw:
            return
        while piece:
            for digest in digests:
                digest.update(piece)
            piece = b"" if piece.endswith(b"\n") or len(piece) <= MAX_LINE else file.readline(MAX_LINE + 1)
        yield raw
