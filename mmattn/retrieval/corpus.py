"""Embed a corpus: files of lines through a text encoder into an `EncodedDataset`, from which an index is built."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from mmattn.data.encode import encode_rows
from mmattn.data.encoded_dataset import EncodedDataset
from mmattn.data.row import Row
from mmattn.errors import AdapterFileError, ConfigError, TextError
from mmattn.memory import Memory
from mmattn.retrieval.embedding_space import Encoder
from mmattn.storage.json_files import parse_json

MAX_LINE = 16 << 20
_JSON_LINES = (".jsonl", ".ndjson")
_BOM = b"\xef\xbb\xbf"


def embed_corpus(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    encoder: Encoder,
    *,
    field: str = "text",
    id_field: str | None = None,
    texts_per_shard: int = 10_000,
    batch_size: int = 32,
    skip_broken: bool = False,
    executor: str = "local",
    progress: bool = False,
) -> EncodedDataset:
    """Embed the lines of files, going on where an earlier call ended; see `mmattn.training.encode_rows`.

    Args:
        files: JSON lines (.jsonl, .ndjson) or plain text files, one text per line; blank lines are passed over.
        out: the folder, created where there is none.
        encoder: has `encode(texts, batch_size=)` that gives a Memory of one slot per text, `dim` and `fingerprint`.
        field: of a JSON line, the key of the text; all other keys become metadata.
        id_field: of a JSON line, the key of its id; by default the id of a line is "file name:number".
        texts_per_shard: texts of each shard.
        batch_size: texts the encoder reads at once.
        skip_broken: leave out lines without a text (no UTF-8, no JSON, no such field, NUL or a carriage return within
            it, more than 16 MiB) and name them in `left_out`, instead of refusing them.
        executor: "local", this process and those of torchrun; or "ray", the workers of a Ray cluster.
        progress: show the texts done.

    Returns:
        The rows, whose `entries()` an index is built from: ids, texts, metadata and vectors in float32.

    Raises:
        ConfigError: broken lines, by file and number; a folder of another encoder or corpus; a setting outside what is
            allowed; or an encoder of several slots per text.
        TextError: no line has a text.
        MissingExtraError: pyarrow or ray is not installed.
        OSError: the disk is full, or `out` is not writable.

    >>> import tempfile
    >>> from mmattn.encoders import TextEncoder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "flowers.txt"
    ...     _ = file.write_text("Bluebells flower in April.\\nDaisies flower all year.\\n")
    ...     dataset = embed_corpus(file, Path(folder) / "out", TextEncoder())
    ...     for ids, texts, metadata, vectors in dataset.entries():
    ...         print(ids, texts[1], metadata, vectors.shape)
    ['flowers.txt:1', 'flowers.txt:2'] Daisies flower all year. [{}, {}] torch.Size([2, 384])
    """
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    lines = _Lines([Path(path).absolute() for path in paths], field, id_field)
    if not len(lines):
        raise TextError(f"there is nothing to embed: {lines.names} have only blank lines, or nothing at all")
    return encode_rows(
        lines,
        out,
        passages=_Passages(encoder),
        dtype="float32",
        source=lines.names,
        strict=not skip_broken,
        batch_size=batch_size,
        contents_per_shard=texts_per_shard,
        executor=executor,
        progress=progress,
    )


class _Passages:
    """A pooling encoder as an encoder of passages, whose vectors are checked."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.dim, self.fingerprint = encoder, encoder.dim, encoder.fingerprint
        self.device = getattr(encoder, "device", None)

    def __call__(self, texts: list[str], batch_size: int) -> Memory:
        encode = getattr(self.encoder, "encode_document", self.encoder.encode)
        memory = encode(texts, batch_size=batch_size)
        if memory.length != 1:
            raise ConfigError(
                f"an entry of an index has one vector, and the encoder gave {memory!r}; use an encoder that pools"
            )
        memory.check_finite()
        return memory


class _Lines(Sequence[Row]):
    """The lines of files that are not blank."""

    def __init__(self, files: Sequence[Path], field: str, id_field: str | None) -> None:
        names = [file.name for file in files]
        if not names:
            raise ConfigError("a corpus needs at least one file, got none")
        double = next((name for name in names if names.count(name) > 1), None)
        if double:
            raise ConfigError(f"two files of the corpus are called {double!r}, so their lines could not be told apart")
        self.field, self.id_field = field, id_field
        self.names = ", ".join(names[:5]) + ", …" * (len(names) > 5)
        self._lines: list[tuple[Path, int, bytes]] = []
        digest = hashlib.sha256(repr((names, field, id_field)).encode())
        for path in files:
            if not path.is_file():
                raise AdapterFileError(f"the corpus has no file {str(path)!r}: there is no such file")
            raw = path.read_bytes()
            digest.update(hashlib.sha256(raw).digest())
            # A mark may stand in any line: files are joined, each with its own.
            lines = enumerate((line.removeprefix(_BOM) for line in raw.split(b"\n")), 1)
            self._lines += [(path, number, line) for number, line in lines if line.strip()]
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self._row(*line) for line in self._lines[number]]
        return self._row(*self._lines[number])

    def _row(self, path: Path, line: int, raw: bytes) -> Row:
        """Return the row in a line; ConfigError says what is wrong and where."""
        place = f"{path.name}:{line}"
        if len(raw) > MAX_LINE:
            raise ConfigError(f"{place} has more than {MAX_LINE:,} bytes; cut it into lines, or into chunks")
        if b"\0" in raw:
            raise ConfigError(f"{place} has NUL characters: convert the file to UTF-8, if it is UTF-16")
        try:
            decoded = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{place} is not UTF-8 ({error.reason} at byte {error.start}); convert the file"
            ) from error
        if path.suffix.lower() not in _JSON_LINES:
            if "\r" in decoded:
                raise ConfigError(f"{place} has a carriage return within it: end lines with a line feed")
            return Row(decoded, passages=(decoded,), id=place, metadata={})
        try:
            value = parse_json(place, raw, MAX_LINE)
        except AdapterFileError as error:
            raise ConfigError(str(error)) from error
        if not isinstance(value, dict):
            raise ConfigError(f"{place} holds no JSON object but {type(value).__name__}")
        name = place if self.id_field is None else value.pop(self.id_field, None)
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise ConfigError(f"{place} has no text or whole number in its field {self.id_field!r}, got {name!r:.40}")
        text = value.pop(self.field, None)
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{place} has no text in its field {self.field!r}, got {text!r:.40}")
        return Row(text, passages=(text,), id=str(name), metadata=value)
