"""Documents for an index: cut into overlapping chunks, and files of lines embedded into a dataset."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmattn.data.encoded import encode_dataset, first_few
from mmattn.errors import AdapterFileError, ConfigError, ShapeError, TextError, check_int, import_extra
from mmattn.memory import Memory
from mmattn.retrieval.embedding_space import Encoder
from mmattn.storage.json_files import parse_json
from mmattn.tokenization import check_text

if TYPE_CHECKING:
    from datasets import Dataset

MAX_LINE = 16 << 20
_JSON_LINES = (".jsonl", ".ndjson")
_BOM = b"\xef\xbb\xbf"
# Scripts that put no spaces between words: Thai, Lao, Tibetan, Myanmar, Khmer; Chinese and Japanese with their marks.
_SPACELESS = (
    "\u0e01-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"
    "\u2e80-\u2fdf\u3001-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f\U00020000-\U0003ffff"
)
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0x3100)) if unicodedata.category(mark)[0] == "M")
_MARKS += "\ufe00-\ufe0f\uff9e\uff9f\U000e0100-\U000e01ef"
# A word, or in such a script a character with what is written on it.
_WORD = re.compile(rf"[{_SPACELESS}][{_MARKS}]*|[^\s{_SPACELESS}]+")


@dataclass(frozen=True)
class Chunk:
    """A piece of a document.

    Attributes:
        text: the piece, stripped of blanks.
        source: the name of its document.
        start: first character in the document.
        end: end in the document: `text == document[start:end]`.
    """

    text: str
    source: Any
    start: int
    end: int


def chunk(
    texts: str | Iterable[str],
    size: int,
    overlap: int = 0,
    *,
    sources: Sequence[Any] | None = None,
    unique: bool = True,
) -> list[Chunk]:
    """Cut documents into chunks of at most `size` words; neighbours share `overlap` words.

    A chunk lies in one document, and the end of a document is not repeated in a chunk of its own. In scripts without
    spaces between words, such as Chinese, Japanese and Thai, characters count as words.

    Args:
        texts: one document or several. Those without a word give no chunk.
        size: words of a chunk.
        overlap: how many of these a chunk shares with the one before it.
        sources: the name of each document; its number by default.
        unique: return only the first of chunks with equal text.

    Raises:
        ConfigError: a size below 1, or an overlap not below it.
        ShapeError: not as many sources as texts.
        TextError: an item that is no text.

    >>> [piece.text for piece in chunk("one two three four five", size=3, overlap=1)]
    ['one two three', 'three four five']
    >>> chunk(["Rain fell.", "It was cold."], size=2, sources=["a.txt", "b.txt"])[1]
    Chunk(text='It was', source='b.txt', start=0, end=6)
    """
    documents = check_text(texts)
    check_int("size", size)
    check_int("overlap", overlap, at_least=0)
    if overlap >= size:
        raise ConfigError(f"overlap must be below size; got {overlap} of {size}")
    names: Sequence[Any] = range(len(documents)) if sources is None else sources
    if len(names) != len(documents):
        raise ShapeError(f"sources need one entry per text, {len(documents)}; got {len(names)}")
    chunks: list[Chunk] = []
    texts_so_far: set[str] = set()
    for document, source in zip(documents, names, strict=True):
        words = [word.span() for word in _WORD.finditer(document)]
        for first in range(0, max(len(words) - overlap, min(len(words), 1)), size - overlap):
            start, end = words[first][0], words[first : first + size][-1][1]
            text = document[start:end]
            if unique and text in texts_so_far:
                continue
            texts_so_far.add(text)
            chunks.append(Chunk(text, source, start, end))
    return chunks


def embed_corpus(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    encoder: Encoder,
    *,
    field: str = "text",
    id_field: str | None = None,
    rows_per_shard: int = 10_000,
    batch_size: int = 32,
    skip_broken: bool = False,
) -> tuple[Dataset, list[str]]:
    """Embed the lines of files, going on where an earlier call ended; see `mmattn.training.encode_dataset`.

    Args:
        files: JSON lines (.jsonl, .ndjson) or plain text files, one text per line; blank lines are passed over.
        out: the folder of the shards, created where there is none.
        encoder: has `encode(texts, batch_size=)` that gives a Memory of one slot per text, `dim` and `fingerprint`.
        field: of a JSON line, the key of the text; all other keys become metadata.
        id_field: of a JSON line, the key of its id; by default the id of a line is "file name:number".
        rows_per_shard: texts of each shard.
        batch_size: texts the encoder reads at once.
        skip_broken: leave out lines without a text (no UTF-8, no JSON, no such field, NUL or a carriage return within
            it, more than 16 MiB), instead of refusing them.

    Returns:
        The rows, with columns `id`, `text`, `metadata` (JSON) and `memory` (1, e) in float32, and why lines were left
        out.

    Raises:
        ConfigError: broken lines, by file and number; a setting that is not allowed; or an encoder of several
            slots per text.
        TextError: no line has a text.
        MissingExtraError: datasets is not installed.
        OSError: the disk is full, or `out` is not writable.

    >>> import tempfile
    >>> from mmattn.encoders import TextEncoder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "flowers.txt"
    ...     _ = file.write_text("Bluebells flower in April.\\nDaisies flower all year.\\n")
    ...     rows, _ = embed_corpus(file, Path(folder) / "out", TextEncoder())
    ...     rows["id"][1], rows["text"][1], rows.with_format("torch")[1]["memory"].shape
    ('flowers.txt:2', 'Daisies flower all year.', torch.Size([1, 384]))
    """
    paths = [Path(path) for path in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    names = [path.name for path in paths]
    if not names:
        raise ConfigError("a corpus needs at least one file, got none")
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two files of the corpus are called {double!r}, so their lines could not be told apart")
    rows: dict[str, list[str]] = {name: [] for name in ("id", "text", "passage", "metadata")}
    broken: list[str] = []
    for path in paths:
        if not path.is_file():
            raise AdapterFileError(f"the corpus has no file {str(path)!r}: there is no such file")
        # A byte-order mark may stand in any line: files are joined, each with its own.
        lines = enumerate((line.removeprefix(_BOM) for line in path.read_bytes().split(b"\n")), 1)
        for number, line in lines:
            if line.strip():
                try:
                    row = _read_line(line, path, number, field, id_field)
                except ConfigError as error:
                    broken.append(str(error))
                    continue
                for name, values in rows.items():
                    values.append(row[name])
    count = len(rows["text"])
    if broken and not (skip_broken and count):
        raise ConfigError(f"{len(broken)} of {count + len(broken)} lines cannot be used:\n{first_few(broken)}")
    if not count:
        raise TextError(f"there is nothing to embed: {', '.join(names[:5])} have only blank lines, or nothing at all")
    dataset = import_extra("datasets", "train").Dataset.from_dict(rows)
    options: dict[str, Any] = {"dtype": "float32", "batch_size": batch_size, "rows_per_shard": rows_per_shard}
    return encode_dataset(dataset, out, passages=_Passages(encoder), **options), broken


class _Passages:
    """A pooling encoder as an encoder of passages, whose vectors are checked."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.dim, self.fingerprint = encoder, encoder.dim, encoder.fingerprint

    def __call__(self, texts: list[str], batch_size: int) -> Memory:
        encode = getattr(self.encoder, "encode_document", self.encoder.encode)
        memory = encode(texts, batch_size=batch_size)
        if memory.length != 1:
            raise ConfigError(
                f"an entry of an index has one vector, and the encoder gave {memory!r}; use an encoder that pools"
            )
        memory.check_finite()
        return memory


def _read_line(raw: bytes, path: Path, number: int, field: str, id_field: str | None) -> dict[str, str]:
    """Return id, text and metadata in a line; ConfigError says what is wrong and where."""
    place = f"{path.name}:{number}"
    if len(raw) > MAX_LINE:
        raise ConfigError(f"{place} has more than {MAX_LINE:,} bytes; cut it into lines, or into chunks")
    if b"\0" in raw:
        raise ConfigError(f"{place} has NUL characters: convert the file to UTF-8, if it is UTF-16")
    try:
        decoded = raw.decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    if path.suffix.lower() not in _JSON_LINES:
        if "\r" in decoded:
            raise ConfigError(f"{place} has a carriage return within it: end lines with a line feed")
        return {"id": place, "text": decoded, "passage": decoded, "metadata": "{}"}
    try:
        value = parse_json(place, raw, MAX_LINE)
    except AdapterFileError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place} holds no JSON object but {type(value).__name__}")
    name = place if id_field is None else value.pop(id_field, None)
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ConfigError(f"{place} has no text or whole number in its field {id_field!r}, got {name!r:.40}")
    text = value.pop(field, None)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{place} has no text in its field {field!r}, got {text!r:.40}")
    return {"id": str(name), "text": text, "passage": text, "metadata": json.dumps(value, ensure_ascii=False)}
