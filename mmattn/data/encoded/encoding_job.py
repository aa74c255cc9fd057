"""What computes and writes the shards of a plan, in any process and in any order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmattn.data.encoded.blocks import Entry, Part
from mmattn.data.encoded.manifest import KINDS, Kind, Plan
from mmattn.data.encoded.owners import Contents, content_key, owners, parts_of
from mmattn.data.encoded.shards import ShardWriter, open_shard
from mmattn.data.file_folders import FileFolder
from mmattn.data.row_contents import encode_parts, given_memory, why_unreadable
from mmattn.data.rows import Row
from mmattn.errors import AdapterFileError, ConfigError, ImageError

CONTENTS = "contents"
# Batches of rows that are taken at once: enough for an encoder to sort texts by length.
_BATCHES = 16

Advance = Callable[[int], None]
EntryOf = Callable[[str, Any], tuple[Part, bytes]]


def _silent(count: int) -> None:
    pass


@dataclass(frozen=True)
class EncodingJob:
    """The shards of a plan, each made from its own rows of the source.

    Args:
        rows: of the source.
        folder: of the store.
        encoders: of pictures and passages, where there are some.
        batch_size: of the encoders.
        plan: which rows become which shard.
        strict: refuse pictures that cannot be read, instead of leaving their rows out.
    """

    rows: Any
    folder: Path
    encoders: Mapping[Kind, Any]
    batch_size: int
    plan: Plan
    strict: bool

    @property
    def device(self) -> torch.device:
        """Where the encoders run."""
        known = (getattr(encoder, "device", None) for encoder in self.encoders.values())
        return next((device for device in known if device is not None), torch.device("cpu"))

    def missing_contents(self, among: Iterable[int] | None = None) -> list[int]:
        """The shards whose contents are not known yet.

        Args:
            among: the shards that are looked for; None for all of the plan.
        """
        return [n for n in (self.plan.shards if among is None else among) if self._contents(n) is None]

    def read_contents(self, number: int, advance: Advance = _silent) -> None:
        """Write down the checksums of all contents of a shard's rows.

        Args:
            number: of the shard.
            advance: is told how many rows are done.
        """
        made = Contents.of(_counted(self._rows_of(number), advance))
        (self.folder / CONTENTS).mkdir(exist_ok=True)
        made.save(self._contents_file(number), self.plan.sha256)

    def missing(self, among: Iterable[int] | None = None) -> list[int]:
        """The shards that are not there, or are of no use.

        Args:
            among: the shards that are looked for; None for all of the plan.
        """
        folder = FileFolder(self.folder)
        return [n for n in (self.plan.shards if among is None else among) if not self.is_made(folder, n)]

    def is_made(self, folder: FileFolder, number: int) -> bool:
        """Whether a shard is there, whole, and of this plan.

        Args:
            folder: of the store, as it is now.
            number: of the shard.
        """
        try:
            return open_shard(folder, number).metadata.get("plan") == self.plan.sha256
        except AdapterFileError:
            return False

    def make(self, number: int, advance: Advance = _silent) -> None:
        """Encode the contents that a shard owns, and write its rows; the contents of all shards are known.

        Args:
            number: of the shard.
            advance: is told how many rows are done.

        Raises:
            ImageError: a picture that cannot be read, and `strict` is set.
            TextError: a passage that cannot be read.
            ConfigError: contents that changed meanwhile, or vectors that do not fit.
        """
        contents, found = self._contents(number), self._owners[number]
        assert contents is not None
        parts = zip(map(tuple, found.tolist()), contents.keys.numpy(), strict=True)
        known = iter((part, key.tobytes()) for part, key in parts)
        self.make_of(number, self._rows_of(number), lambda kind, part: next(known), advance)

    def make_of(self, number: int, rows: Iterable[Row | str], entry_of: EntryOf, advance: Advance) -> None:
        """Encode and write a shard of given rows.

        Args:
            number: of the shard.
            rows: its rows, and in the place of one that cannot be used the reason.
            entry_of: the entry and key of each part of them, called in order.
            advance: is told how many rows are done.
        """
        plan = self.plan
        shard = _Shard(self, ShardWriter(number, plan.dim, plan.dtype, plan.block_bytes), plan.rows_of(number).start)
        for some in _chunks(rows, _BATCHES * self.batch_size):
            shard.add(some, entry_of)
            advance(len(some))
        about = {"plan": plan.sha256, "kinds": sorted(shard.kinds), "rows": shard.rows, "left_out": shard.left_out}
        shard.writer.write(self.folder, about)

    @cached_property
    def _owners(self) -> dict[int, Tensor]:
        """The entries of all parts of each shard."""
        folder, plan = FileFolder(self.folder), self.plan
        earlier = [open_shard(folder, number).read("keys") for number in range(plan.first_shard)]
        contents = []
        for number in plan.shards:
            read = self._contents(number)
            if read is None:
                raise AdapterFileError(f"{str(self._contents_file(number))!r} is gone: start the same command again")
            contents.append(read)
        return dict(zip(plan.shards, owners(earlier, contents), strict=True))

    def _rows_of(self, number: int) -> Iterator[Row | str]:
        return rows_or_reasons(self.rows, self.plan.rows_of(number), self.strict)

    def _contents(self, number: int) -> Contents | None:
        return Contents.load(self._contents_file(number), self.plan.sha256)

    def _contents_file(self, number: int) -> Path:
        return self.folder / CONTENTS / f"{number:06d}.safetensors"


class _Part(NamedTuple):
    """A part of a row's memory: its kind, itself, the entry that has its vectors, and the key of its content."""

    kind: str
    content: Any
    place: Part
    key: bytes


class _Shard:
    """A shard that is being made.

    Args:
        job: that it is of.
        writer: of its file.
        first_row: number of its first row in the source.
    """

    def __init__(self, job: EncodingJob, writer: ShardWriter, first_row: int) -> None:
        self.job, self.writer, self.first_row = job, writer, first_row
        self.rows = 0
        self.left_out: list[str] = []
        self.kinds: set[str] = set()
        self._entries = 0
        self._broken: set[int] = set()

    def add(self, rows: Sequence[Row | str], entry_of: EntryOf) -> None:
        """Add rows, of which those that cannot be used are named and left out."""
        parts = [[_Part(kind, content, *entry_of(kind, content)) for kind, content in parts_of(row)] for row in rows]
        new: dict[int, _Part] = {}
        for part in itertools.chain.from_iterable(parts):
            # Entries are numbered as they are met first.
            if part.place == (self.writer.number, self._entries + len(new)):
                new[part.place[1]] = part
        vectors = self._encoded(new)
        self._entries += len(new)
        for row, own in zip(rows, parts, strict=True):
            self.rows += 1
            if isinstance(row, str):
                self.left_out.append(row)
                continue
            for part in own:
                if new.get(part.place[1]) is part:
                    self.writer.add_entry(part.key, vectors[part.place[1]])
            why = next(filter(None, map(self._unreadable, own)), None)
            if why is None:
                self.kinds |= {part.kind for part in own}
                sources = [image for image in row.images if isinstance(image, str)]
                self.writer.add_row(row.text, row.prompt, [part.place for part in own], sources)
            elif self.job.strict:
                raise ImageError(f"{self._named(row)}{why}; without strict=True such rows are left out and named")
            else:
                self.left_out.append(f"{self._named(row)}{why}")

    def _encoded(self, new: Mapping[int, _Part]) -> dict[int, Entry | None]:
        """The vectors of entries; None of pictures that cannot be read."""
        found: dict[int, Entry | None] = {}
        for kind in KINDS:
            numbers = [entry for entry, part in new.items() if part.kind == kind]
            if numbers and kind not in self.job.encoders:
                raise ConfigError(f"rows of {self.job.plan.source} have {kind}, and there is no encoder for them")
            # Pictures are read from the disk a batch at a time; of passages the encoder makes batches of like length.
            size = self.job.batch_size if kind == "pictures" else max(1, len(numbers))
            for start in range(0, len(numbers), size):
                some = numbers[start : start + size]
                contents = [self._read(new[entry]) for entry in some]
                vectors = encode_parts(self.job.encoders[kind], contents, self.job.batch_size, kind == "pictures")
                found |= {n: None if v is None else Entry(v) for n, v in zip(some, vectors, strict=True)}
        for entry, part in new.items():
            if part.kind == "memories":
                found[entry] = _given(self._read(part))
        self._broken |= {entry for entry, made in found.items() if made is None}
        return found

    def _read(self, part: _Part) -> Any:
        """The content of a part, which is that of its key: of a picture's file its bytes."""
        content, is_file = part.content, isinstance(part.content, (str, os.PathLike)) and part.kind != "passages"
        if is_file and part.kind == "pictures":
            content = Path(content).read_bytes()
        if content_key(part.kind, content) != part.key:
            named = str(part.content) if is_file else f"one of the {part.kind}"
            raise ConfigError(f"{named} was changed while {self.job.plan.source} was encoded: begin anew")
        return content

    def _unreadable(self, part: _Part) -> str | None:
        """Why a picture cannot be read: found alike in the shard that owns it and in any other that refers to it."""
        shard, entry = part.place
        if part.kind != "pictures" or (shard == self.writer.number and entry not in self._broken):
            return None
        return why_unreadable(part.content)

    def _named(self, row: Row) -> str:
        """Where a row is, before the reason why it is left out, which names a file itself."""
        if all(isinstance(image, str) for image in row.images):
            return ""
        return f"row {self.first_row + self.rows - 1} of {self.job.plan.source}: "


def rows_or_reasons(rows: Sequence[Row], numbers: Iterable[int], strict: bool) -> Iterator[Row | str]:
    """Rows, and in the place of one that cannot be used the reason.

    Args:
        rows: of a source.
        numbers: of those that are wanted.
        strict: refuse one that cannot be used.

    Raises:
        ConfigError: one cannot be used, and `strict` is set.
    """
    for number in numbers:
        try:
            row: Row | str = rows[number]
        except ConfigError as error:
            if strict:
                raise
            row = str(error)
        yield row


def _given(memory: Any) -> Entry:
    """What a row comes with, without its padding."""
    given = given_memory(memory)
    real = given.real_slots()[0]
    segments = None if given.segments is None or not given.segments.any() else given.segments[0][real]
    return Entry(given.tokens[0][real], None, segments, None if given.scores is None else given.scores[0][real])


def _chunks(rows: Iterable[Row | str], size: int) -> Iterator[list[Row | str]]:
    some: list[Row | str] = []
    for row in rows:
        some.append(row)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some


def _counted(rows: Iterable[Row | str], advance: Advance) -> Iterator[Row | str]:
    for row in rows:
        yield row
        advance(1)
