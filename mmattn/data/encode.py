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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mmattn.data.encode_plan import (
    Plan,
    Planner,
    Report,
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
from mmattn.data.file_folders import FileFolder
from mmattn.data.readers import StreamRows
from mmattn.data.row_contents import content_key, encode_parts, given_memory, parts_of, why_unreadable
from mmattn.data.rows import Row
from mmattn.errors import ConfigError, ImageError, check_choice, check_int, import_extra
from mmattn.progress import counted
from mmattn.storage.files import lock_folder

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
    pictures: Any = None,
    passages: Any = None,
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
    both: dict[Kind, Any] = {"pictures": pictures, "passages": passages}
    encoders = {kind: encoder for kind, encoder in both.items() if encoder is not None}
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with _locked(folder) if rank == 0 else contextlib.nullcontext():
        if rank == 0:
            names = encoder_names or {}
            infos = {kind: EncoderInfo.of(encoder, names.get(kind)) for kind, encoder in encoders.items()}
            planner = Planner(rows, folder, infos, source, strict, progress)
            widths = [encoder.dim for encoder in encoders.values()]
            plan = planner.begin(widths, dim, dtype, append, contents_per_shard)
        else:
            plan = _plan_of_others(folder, rows_fingerprint(rows, source))
        if plan is not None:
            job = _Job(rows, folder, encoders, batch_size, block_bytes, plan, strict)
            job.run(rank, world, executor, progress and rank == 0)
            if rank == 0:
                finish(plan, folder)
            _wait_until(lambda: is_complete(folder, plan.fingerprint))
    return EncodedDataset(folder)


class _Part(NamedTuple):
    """A content to encode: its number, kind and key, and the source's row that has it."""

    number: int
    kind: str
    content: Any
    key: bytes
    row: int


@dataclass(frozen=True)
class _Job:
    """Makes the shards of a plan, in any process and in any order."""

    rows: Any
    folder: Path
    encoders: Mapping[Kind, Any]
    batch_size: int
    block_bytes: int
    plan: Plan
    strict: bool

    def run(self, rank: int, world: int, executor: str, progress: bool) -> None:
        """Make this process' share of the missing shards, and wait for the others."""
        todo = self.missing()
        if executor == "local":
            todo = [number for number in todo if number % world == rank]
        count = sum(len(self.plan.contents_of(number)) for number in todo)
        with counted(count, "encoding contents", progress and bool(todo)) as advance:
            if executor == "ray":
                _run_on_ray(self, todo, advance)
            else:
                self.make(todo, advance)
        missing: Sequence[int] = self.plan.shards
        while missing := self.missing(missing):
            time.sleep(_PAUSE)

    def missing(self, shards: Sequence[int] | None = None) -> list[int]:
        """Return the shards, of all or some, that are not there, or torn."""
        if is_complete(self.folder, self.plan.fingerprint):
            return []
        sizes = FileFolder(self.folder).sizes
        reports = {n: read_report(self.folder, self.plan, n) for n in (self.plan.shards if shards is None else shards)}
        return [n for n, one in reports.items() if one is None or sizes.get(shard_name(n)) != one.size]

    def make(self, numbers: Sequence[int], advance: Callable[[int], None] = lambda count: None) -> None:
        """Make shards."""
        parts = self._parts([content for number in numbers for content in self.plan.contents_of(number)])
        for number in numbers:
            broken: dict[int, str] = {}
            some = itertools.islice(parts, len(self.plan.contents_of(number)))
            path = self.folder / shard_name(number)
            shard = write_shard(path, self._blocks(some, broken, advance), self.plan.dim, self.plan.dtype)
            report = Report(**shard.model_dump(), rows_sha256=self.plan.rows_sha256, broken=broken)
            write_description(report_path(self.folder, number), report)

    @cached_property
    def _table(self) -> Any:
        files = FileFolder(self.folder / WORK)
        return read_rows_file(files, "rows.arrow", rows_schema(with_numbers=True), self.plan.rows_sha256)

    @cached_property
    def _first_places(self) -> tuple[Any, Any, Any]:
        """Row of the source, part of the row, and key of each new content, where it comes first."""
        import numpy as np

        starts, numbers = lists_of(self._table["contents"])
        _, keys = lists_of(self._table["keys"])
        # Contents are numbered in the order in which they come first.
        highest = np.maximum.accumulate(np.concatenate([[self.plan.first_content - 1], numbers]))
        first = np.flatnonzero(numbers > highest[:-1])
        row = np.searchsorted(starts, first, side="right") - 1
        return self._table["number"].to_numpy()[row], first - starts[row], keys[first]

    def _parts(self, contents: Sequence[int]) -> Iterator[_Part]:
        """Iterate over new contents, of ascending numbers, read from the rows that have them first."""
        rows, places, keys = self._first_places
        wanted = [int(rows[number - self.plan.first_content]) for number in contents]
        source = rows_or_reasons(self.rows, (number for number, _ in itertools.groupby(wanted)))
        at, row = -1, None
        for number, place in zip(contents, wanted, strict=True):
            while at != place:
                try:
                    at, row = next(source)
                except StopIteration:
                    raise self._changed("the rows") from None
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
        size = 0
        while some := list(itertools.islice(parts, _BATCHES * self.batch_size)):
            encoded = self._encoded(some, broken)
            for part in some:
                vectors = encoded.get(part.number)
                block.append(Vectors(torch.empty(0, self.plan.dim)) if vectors is None else vectors)
                size += block[-1].tokens.shape[0] * self.plan.dim * DTYPES[self.plan.dtype].itemsize
                if size >= self.block_bytes:
                    yield block
                    block, size = [], 0
            advance(len(some))
        if block:
            yield block

    def _encoded(self, parts: Sequence[_Part], broken: dict[int, str]) -> dict[int, Vectors]:
        """Return the vectors of contents by number, without those of pictures that cannot be read."""
        encoded = {part.number: _saved(self._read(part)) for part in parts if part.kind == "memories"}
        for kind, encoder in self.encoders.items():
            own = [part for part in parts if part.kind == kind]
            # Pictures are read a batch at a time; of passages the encoder makes batches of similar length.
            size = self.batch_size if kind == "pictures" else max(1, len(own))
            for start in range(0, len(own), size):
                some = own[start : start + size]
                contents = [self._read(part) for part in some]
                tokens = encode_parts(encoder, contents, self.batch_size, kind == "pictures")
                for part, one in zip(some, tokens, strict=True):
                    if one is None:
                        broken[part.number] = self._reason(part)
                    else:
                        encoded[part.number] = Vectors(one)
        return encoded

    def _reason(self, part: _Part) -> str:
        """Return why a picture cannot be read; raise it with `strict`."""
        why = why_unreadable(part.content) or "it cannot be read"
        if self.strict:
            where = "" if isinstance(part.content, (str, os.PathLike)) else f"row {part.row} of {self.plan.source}: "
            raise ImageError(f"{where}{why}; without strict=True such rows are left out and named")
        return why

    def _read(self, part: _Part) -> Any:
        """Return a content, of a picture's file its bytes, whose key is the one in the plan."""
        content, is_file = part.content, isinstance(part.content, (str, os.PathLike)) and part.kind != "passages"
        if is_file and part.kind == "pictures":
            content = Path(content).read_bytes()
        if content_key(part.kind, content) != part.key:
            raise self._changed(str(part.content) if is_file else f"one of the {part.kind} of row {part.row}")
        return content

    def _changed(self, what: str) -> ConfigError:
        return ConfigError(f"{what} was changed while {self.plan.source} was encoded: begin anew in another folder")


def _saved(memory: Any) -> Vectors:
    """Return the vectors of a saved memory, without its padding."""
    memory = given_memory(memory)
    real = memory.real_slots()[0]
    segments = None if memory.segments is None or not memory.segments.any() else memory.segments[0][real]
    return Vectors(memory.tokens[0][real], None, segments, None if memory.scores is None else memory.scores[0][real])


class _RayWorker:
    """An actor of Ray, which makes shards."""

    def __init__(self, job: _Job) -> None:
        self.job = job

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.job.make([int(number) for number in batch["item"]])
        return batch


def _run_on_ray(job: _Job, numbers: Sequence[int], advance: Callable[[int], None]) -> None:
    """Make shards in the actors of a Ray cluster, each with a GPU where the encoders run on one."""
    ray, data = import_extra("ray", "scale"), import_extra("ray.data", "scale")
    if not numbers:
        return
    devices = [getattr(encoder, "device", None) for encoder in job.encoders.values()]
    on_gpu = any(device is not None and device.type == "cuda" for device in devices)
    if not ray.is_initialized():
        ray.init()
    workers = max(1, int(ray.cluster_resources().get("GPU" if on_gpu else "CPU", 1)))
    made = data.from_items(list(numbers), override_num_blocks=len(numbers)).map_batches(
        _RayWorker,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=data.ActorPoolStrategy(min_size=1, max_size=min(workers, len(numbers))),
        num_gpus=1 if on_gpu else 0,
    )
    for batch in made.iter_batches(batch_size=1):
        advance(sum(len(job.plan.contents_of(int(number))) for number in batch["item"]))


def _plan_of_others(folder: Path, fingerprint: str) -> Plan | None:
    """Wait for the plan of the main process; None where it found the rows encoded already."""
    plan: Plan | None = None

    def is_there() -> bool:
        nonlocal plan
        plan = read_plan(folder)
        return is_complete(folder, fingerprint) or (plan is not None and plan.fingerprint == fingerprint)

    _wait_until(is_there)
    return None if is_complete(folder, fingerprint) else plan


def _wait_until(ready: Callable[[], bool]) -> None:
    while not ready():
        time.sleep(_PAUSE)


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
