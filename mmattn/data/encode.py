"""Encode rows: frozen encoders run once over pictures and passages, and the vectors are written to an `EncodedDataset`.

The main process goes through the rows once, gives each content a number in the order in which contents come, and writes
the rows and a plan. A shard of vectors holds a range of those numbers, so any process can make it at any time; each is
written in one step, and whoever starts again makes those that are missing. The manifest is written last.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from mmattn.data.encode_plan import (
    Plan,
    Report,
    Request,
    begin,
    finish,
    is_complete,
    read_plan,
    read_report,
    report_path,
    rows_fingerprint,
    rows_or_reasons,
)
from mmattn.data.encoded_dataset import EncodedDataset
from mmattn.data.encoded_files import (
    DTYPES,
    WORK,
    Array,
    EncoderInfo,
    Kind,
    Vectors,
    lists_of,
    read_rows_file,
    rows_schema,
    shard_name,
    write_description,
    write_shard,
)
from mmattn.data.readers import StreamRows
from mmattn.data.row import Row, RowEncoder, content_key, encode_parts, given_memory, parts_of, why_unreadable
from mmattn.errors import ConfigError, ImageError, check_choice, check_int, import_extra
from mmattn.progress import counted
from mmattn.storage.files import FileFolder, lock_folder

CONTENTS_PER_SHARD = 4096
BLOCK_BYTES = 16 << 20
"""Vectors of a block, about: large enough for the disk, small enough that many are in memory at once."""
_BATCHES = 16
"""Batches that an encoder gets at once: enough to sort texts by length."""
_PAUSE = 0.2
"""Seconds between two looks at the work of other processes."""


def encode_rows(
    rows: Sequence[Row] | StreamRows,
    out: str | os.PathLike[str],
    *,
    pictures: RowEncoder | None = None,
    passages: RowEncoder | None = None,
    dim: int | None = None,
    dtype: str = "float16",
    source: str = "rows",
    encoder_names: Mapping[str, str] | None = None,
    append: bool = False,
    strict: bool = False,
    batch_size: int = 32,
    contents_per_shard: int = CONTENTS_PER_SHARD,
    block_bytes: int = BLOCK_BYTES,
    executor: str = "local",
    progress: bool = False,
) -> EncodedDataset:
    """Encode the memories of rows, going on where an earlier call with the same rows and encoders ended.

    Each picture, passage and saved memory is encoded and stored once, however many rows have it. Under torchrun or
    `accelerate launch` (wherever RANK and WORLD_SIZE are set) each process makes a share of the shards, and all return
    when the dataset is complete.

    Args:
        rows: of a language model: a sequence, such as `read_rows` returns, or a stream, which is read twice.
        out: the folder, created where there is none.
        pictures: encoder of pictures; None where no row has any.
        passages: encoder of passages; None where no row has any.
        dim: width e of the vectors, narrower ones are padded with zeros; None for that of the widest encoder.
        dtype: of the stored vectors: "float16", "bfloat16", "float32", or "int8" with a scale for each slot.
        source: name of the rows, for messages and the manifest.
        encoder_names: of "pictures" and "passages", under which the encoders were loaded.
        append: add the rows to a dataset of other rows.
        strict: refuse rows that cannot be used, instead of naming them in `left_out`.
        batch_size: pictures or passages encoded at once.
        contents_per_shard: size of a shard; a process that is killed loses the shard it was making.
        block_bytes: vectors of a block, about: the part of a shard that is read at once.
        executor: "local", or "ray" for the workers of a Ray cluster, which must see the files of `rows` and `out`.
        progress: show the contents done.

    Raises:
        ConfigError: a setting outside what is allowed, a folder that holds something else, or contents that changed.
        ImageError: a picture that cannot be read, with `strict`.
        TextError: a passage that cannot be read.
        MissingExtraError: pyarrow or ray is not installed.
        OSError: the disk is full, `out` is not writable, or a file cannot be read.

    >>> import tempfile
    >>> from mmattn.encoders import TextEncoder
    >>> flowers = [Row("blue", passages=("Bluebells are blue.",)), Row("red", passages=("Poppies are red.",))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dataset = encode_rows(flowers, folder, passages=TextEncoder())
    ...     dataset, dataset[1].text, dataset[1].memory
    (EncodedDataset(rows=2, e=384, float16, shards=1), 'red', Memory(b=1, m=1, e=384, float16, segments))
    """
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("executor", executor, ("local", "ray"))
    sizes = {"batch_size": batch_size, "contents_per_shard": contents_per_shard, "block_bytes": block_bytes}
    for name, count in (sizes if dim is None else sizes | {"dim": dim}).items():
        check_int(name, count)
    if isinstance(rows, StreamRows):
        check_choice("executor", executor, ("local",))  # a stream has no numbers to share out
        rows = copy.copy(rows)
        rows.skip_broken = not strict
    both: dict[Kind, RowEncoder | None] = {"pictures": pictures, "passages": passages}
    encoders = {kind: encoder for kind, encoder in both.items() if encoder is not None}
    infos = {kind: EncoderInfo.of(encoder, (encoder_names or {}).get(kind)) for kind, encoder in encoders.items()}
    folder = Path(out).absolute()
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    request = Request(
        rows, folder, encoders, infos, source, dim, dtype, append, strict, progress=progress and rank == 0, **sizes
    )
    if rank:
        plan = _plan_of_others(folder, rows_fingerprint(rows, source))
        if plan is not None:
            _Job(request, plan).run(rank, world, executor)
            while not is_complete(folder, plan.fingerprint):
                time.sleep(_PAUSE)
        return EncodedDataset(folder)
    with _locked(folder):
        try:
            plan = begin(request)
        except BaseException:
            if is_new:
                shutil.rmtree(folder)
            raise
        if plan is not None:
            _Job(request, plan).run(rank, world, executor)
            finish(plan, folder)
    return EncodedDataset(folder)


class _Part(NamedTuple):
    """A content to encode: its number, kind and key, and the source's row that has it."""

    number: int
    kind: str
    content: object
    key: bytes
    row: int


@dataclass(frozen=True)
class _Job:
    """Makes the shards of a plan, in any process and in any order."""

    request: Request
    plan: Plan

    def run(self, rank: int, world: int, executor: str) -> None:
        """Make this process' share of the missing shards, and wait for the others."""
        todo = self.missing(self.plan.shards)
        if executor == "local":
            todo = [number for number in todo if number % world == rank]
        count = sum(len(self.plan.contents_of(number)) for number in todo)
        with counted(count, "encoding contents", self.request.progress and bool(todo)) as advance:
            (_run_on_ray if executor == "ray" else _Job.make)(self, todo, advance)
        missing: Sequence[int] = self.plan.shards
        while missing := self.missing(missing):
            time.sleep(_PAUSE)

    def missing(self, shards: Sequence[int]) -> list[int]:
        """Return the shards that are not there, or torn."""
        folder = self.request.folder
        if is_complete(folder, self.plan.fingerprint):
            return []
        sizes = FileFolder(folder).sizes
        reports = {number: read_report(folder, self.plan, number) for number in shards}
        return [n for n, one in reports.items() if one is None or sizes.get(shard_name(n)) != one.shard.size]

    def make(self, numbers: Sequence[int], advance: Callable[[int], None] = lambda count: None) -> None:
        """Make shards."""
        folder = self.request.folder
        parts = self._parts([content for number in numbers for content in self.plan.contents_of(number)])
        for number in numbers:
            broken: dict[int, str] = {}
            some = itertools.islice(parts, len(self.plan.contents_of(number)))
            blocks = self._blocks(some, broken, advance)
            shard = write_shard(folder / shard_name(number), blocks, self.plan.dim, self.plan.dtype)
            report = Report(shard=shard, rows_sha256=self.plan.rows_sha256, broken=broken)
            write_description(report_path(folder, number), report)

    @cached_property
    def _first_places(self) -> tuple[Array, Array, Array]:
        """Row of the source, part of the row, and key of each new content, where it comes first."""
        import numpy as np

        files, schema = FileFolder(self.request.folder / WORK), rows_schema(with_numbers=True)
        table = read_rows_file(files, "rows.arrow", schema, self.plan.rows_sha256)
        starts, numbers = lists_of(table["contents"])
        _, keys = lists_of(table["keys"])
        # Contents are numbered in the order in which they come first.
        highest = np.maximum.accumulate(np.concatenate([[self.plan.first_content - 1], numbers]))
        first = np.flatnonzero(numbers > highest[:-1])
        row = np.searchsorted(starts, first, side="right") - 1
        return table["number"].to_numpy()[row], first - starts[row], keys[first]

    def _parts(self, contents: Sequence[int]) -> Iterator[_Part]:
        """Iterate over new contents, of ascending numbers, read from the rows that have them first."""
        rows, places, keys = self._first_places
        source_rows = [int(rows[number - self.plan.first_content]) for number in contents]
        source = rows_or_reasons(self.request.rows, (number for number, _ in itertools.groupby(source_rows)))
        at, parts = -1, list[tuple[str, object]]()
        for number, place in zip(contents, source_rows, strict=True):
            while at < place:
                at, row = next(source, (place, ""))
                parts = parts_of(row) if isinstance(row, Row) else []
            part, key = int(places[number - self.plan.first_content]), keys[number - self.plan.first_content]
            if part >= len(parts):
                raise self._changed(f"row {place}")
            yield _Part(number, *parts[part], key, place)

    def _blocks(
        self, parts: Iterator[_Part], broken: dict[int, str], advance: Callable[[int], None]
    ) -> Iterator[list[Vectors]]:
        """Encode contents, and give them in blocks."""
        block: list[Vectors] = []
        size, slot = 0, self.plan.dim * DTYPES[self.plan.dtype].itemsize
        empty = Vectors(torch.empty(0, self.plan.dim))
        while some := list(itertools.islice(parts, _BATCHES * self.request.batch_size)):
            encoded = self._encoded(some, broken)
            for part in some:
                block.append(encoded.get(part.number, empty))
                size += len(block[-1].tokens) * slot
                if size >= self.request.block_bytes:
                    yield block
                    block, size = [], 0
            advance(len(some))
        if block:
            yield block

    def _encoded(self, parts: Sequence[_Part], broken: dict[int, str]) -> dict[int, Vectors]:
        """Return the vectors of contents by number, without those of pictures that cannot be read."""
        encoded = {part.number: _saved(self._read(part)) for part in parts if part.kind == "memories"}
        for kind, encoder in self.request.encoders.items():
            own = [part for part in parts if part.kind == kind]
            # Pictures are read a batch at a time; of passages the encoder makes batches of similar length.
            size = self.request.batch_size if kind == "pictures" else max(1, len(own))
            for start in range(0, len(own), size):
                some = own[start : start + size]
                contents = [self._read(part) for part in some]
                tokens = encode_parts(encoder, contents, self.request.batch_size, kind == "pictures")
                for part, one in zip(some, tokens, strict=True):
                    if one is None:
                        broken[part.number] = self._reason(part)
                    else:
                        encoded[part.number] = Vectors(one)
        return encoded

    def _reason(self, part: _Part) -> str:
        """Return why a picture cannot be read; raise it with `strict`."""
        why = why_unreadable(part.content) or "it cannot be read"
        if self.request.strict:
            raise ImageError(
                f"row {part.row} of {self.plan.source}: {why}; without strict=True such rows are left out and named"
            )
        return why

    def _read(self, part: _Part) -> object:
        """Return a content, of a picture's file its bytes, whose key is the one in the plan."""
        content, is_file = part.content, part.kind != "passages" and isinstance(part.content, (str, os.PathLike))
        if part.kind == "pictures" and isinstance(content, (str, os.PathLike)):
            content = Path(content).read_bytes()
        if content_key(part.kind, content) != part.key:
            raise self._changed(str(part.content) if is_file else f"one of the {part.kind} of row {part.row}")
        return content

    def _changed(self, what: str) -> ConfigError:
        return ConfigError(f"{what} was changed while {self.plan.source} was encoded: begin anew in another folder")


def _saved(memory: object) -> Vectors:
    """Return the vectors of a saved memory, without its padding."""
    memory = given_memory(memory)
    real = memory.real_slots()[0]
    segments = None if memory.segments is None or not memory.segments.any() else memory.segments[0][real]
    return Vectors(memory.tokens[0][real], None, segments, None if memory.scores is None else memory.scores[0][real])


def _run_on_ray(job: _Job, numbers: Sequence[int], advance: Callable[[int], None]) -> None:
    """Make shards in tasks of a Ray cluster, each with a GPU where the encoders run on one."""
    ray = import_extra("ray", "scale")
    if not ray.is_initialized():
        ray.init()
    devices = [getattr(encoder, "device", None) for encoder in job.request.encoders.values()]
    on_gpu = any(device is not None and device.type == "cuda" for device in devices)
    task, shared = ray.remote(num_gpus=1 if on_gpu else 0)(_Job.make), ray.put(job)
    counts = {task.remote(shared, [number]): len(job.plan.contents_of(number)) for number in numbers}
    pending = list(counts)
    while pending:
        done, pending = ray.wait(pending)
        ray.get(done)
        advance(sum(counts[one] for one in done))


def _plan_of_others(folder: Path, fingerprint: str) -> Plan | None:
    """Wait for the plan of the main process; None if the rows are encoded already."""
    while not is_complete(folder, fingerprint):
        plan = read_plan(folder)
        if plan is not None and plan.fingerprint == fingerprint:
            return plan
        time.sleep(_PAUSE)
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other encodings."""
    try:
        with lock_folder(folder, wait=False):
            yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another process is encoding into {str(folder)!r}: wait for it; processes that share the work are started "
            "by torchrun"
        ) from error
