"""Rows through frozen encoders into a store: by one process, by many, or on Ray; killed at any moment, it goes on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.data.datasets import StreamRows
from mmattn.data.encoded.blocks import Part
from mmattn.data.encoded.encoding_job import EncodingJob
from mmattn.data.encoded.encoding_plan import begin, finish
from mmattn.data.encoded.manifest import PLAN, Kind, Plan, StoredEncoder, read_description
from mmattn.data.encoded.owners import content_key
from mmattn.data.encoded.shards import BLOCK_BYTES, DTYPES
from mmattn.data.encoded.store import MemoryStore
from mmattn.data.file_folders import FileFolder
from mmattn.errors import ConfigError, check_choice, check_int
from mmattn.progress import counted
from mmattn.retrieval.ray_workers import run_on_ray
from mmattn.storage.files import lock_folder
from mmattn.training.distributed import process_state

# Seconds between two looks at what other processes have done.
_PAUSE = 0.2


def encode_rows(
    rows: Any,
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
    rows_per_shard: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    executor: str = "local",
    progress: bool = False,
) -> MemoryStore:
    """Encode the memories of rows into a store, going on where an earlier call with the same rows and encoders ended.

    A content is encoded once: a row whose picture or passage came before refers to where it came first. Under torchrun
    or `accelerate launch` each process makes its share of the shards, and all return when the store is whole.

    Args:
        rows: of a language model: a sequence, such as `read_rows` gives, or a stream. A stream is read once, by every
            process, and its contents are compared within each shard only.
        out: the folder of the store, created where there is none.
        pictures: encoder of pictures; None where no row has any.
        passages: encoder of passages; None where no row has any.
        dim: width e of the vectors, narrower ones are padded with zeros; None for that of the widest encoder, and of
            the memories of the first rows.
        dtype: in which vectors are stored: "float16", "bfloat16", or "int8" with a scale for each slot.
        source: name of the rows, for messages and the manifest.
        encoder_names: of "pictures" and "passages", under which the encoders were loaded.
        append: add the rows to a store of others.
        strict: refuse pictures that cannot be read, instead of naming and leaving out their rows.
        batch_size: pictures or passages encoded at once.
        rows_per_shard: rows of each shard; None for as many as fill about 512 MB, and at most 65,536. A process that is
            killed loses the shard it was making.
        block_bytes: vectors and texts of a block, about: what is read at once.
        executor: "local", or "ray" for the workers of a Ray cluster, which must see the files of `rows` and `out`.
        progress: show the rows done.

    Raises:
        ConfigError: a setting outside what is allowed, a folder that holds something else, or contents that changed.
        ImageError: a picture that cannot be read, with `strict`.
        TextError: a passage that cannot be read.
        MissingExtraError: ray is not installed.
        OSError: the disk is full, `out` is not writable, or a file cannot be read.

    >>> import tempfile
    >>> from mmattn.encoders import TextEncoder
    >>> from mmattn.data.rows import Row
    >>> flowers = [Row("blue", passages=("Bluebells are blue.",)), Row("red", passages=("Poppies are red.",))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = encode_rows(flowers, folder, passages=TextEncoder())
    ...     store, store[1].text, store[1].memory
    (MemoryStore(rows=2, e=384, float16, shards=1), 'red', Memory(b=1, m=1, e=384, float16, segments))
    """
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("executor", executor, ("local", "ray"))
    for name, count in (("batch_size", batch_size), ("block_bytes", block_bytes)):
        check_int(name, count)
    for name, maybe in (("dim", dim), ("rows_per_shard", rows_per_shard)):
        if maybe is not None:
            check_int(name, maybe)
    streamed = not isinstance(rows, Sequence)
    if streamed and executor == "ray":
        raise ConfigError("executor='ray' shares rows by their numbers, and these are streamed: use executor='local'")
    if isinstance(rows, StreamRows):
        rows = copy.copy(rows)
        rows.skip_broken = not strict
    given: dict[Kind, Any] = {"pictures": pictures, "passages": passages}
    encoders = {kind: encoder for kind, encoder in given.items() if encoder is not None}
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    state = process_state()
    with contextlib.ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(_held(folder))
            named = encoder_names or {}
            begin(
                rows,
                folder,
                encoders,
                {kind: StoredEncoder.of(encoder, named.get(kind)) for kind, encoder in encoders.items()},
                dim=dim,
                dtype=dtype,
                source=source,
                append=append,
                batch_size=batch_size,
                rows_per_shard=rows_per_shard,
                block_bytes=block_bytes,
            )
        state.wait_for_everyone()
        plan = read_description(FileFolder(folder), PLAN, Plan)
        if plan is not None:
            job = EncodingJob(rows, folder, encoders, batch_size, plan, strict)
            workers = _Workers(job, state, executor, progress and state.is_main_process)
            shards = workers.stream() if streamed else workers.share()
            state.wait_for_everyone()
            if state.is_main_process:
                finish(plan, folder, shards, getattr(rows, "left_out", ()))
        state.wait_for_everyone()
    return MemoryStore(folder)


class _Workers:
    """The processes that make the shards of a job.

    Args:
        job: what makes them.
        state: which of how many processes this is.
        executor: "local" or "ray".
        progress: show the rows done.
    """

    def __init__(self, job: EncodingJob, state: Any, executor: str, progress: bool) -> None:
        self.job, self.state, self.executor, self.progress = job, state, executor, progress

    def share(self) -> range:
        """Make the shards of a sequence, a share of them; returns their numbers when all are there."""
        job = self.job
        self._share(job.missing_contents, job.read_contents, "reading contents")
        self._share(job.missing, job.make, "encoding rows")
        return job.plan.shards

    def _share(self, missing: Callable[..., list[int]], make: Callable[..., None], label: str) -> None:
        todo = missing()
        self.state.wait_for_everyone()  # so that all begin with the same
        if self.executor == "local":
            todo = todo[self.state.process_index :: self.state.num_processes]
        sizes = {number: len(self.job.plan.rows_of(number)) for number in todo}
        with counted(sum(sizes.values()), label, self.progress and bool(todo)) as advance:
            if self.executor == "ray":
                run_on_ray(make, todo, self.job.device, lambda number: advance(sizes[number]))
            else:
                for number in todo:
                    make(number, advance)
        _wait_for(missing, self.job.plan.shards)

    def stream(self) -> range:
        """Make the shards of a stream, a share of them; returns the numbers of all when all are there."""
        job, plan, there = self.job, self.job.plan, FileFolder(self.job.folder)
        rows, number = iter(job.rows), plan.first_shard
        with counted(None, "encoding rows", self.progress) as advance:
            while (first := next(rows, None)) is not None:
                some = itertools.chain([first], itertools.islice(rows, plan.rows_per_shard - 1))
                own = number % self.state.num_processes == self.state.process_index
                if own and not job.is_made(there, number):
                    job.make_of(number, some, _first_seen(number), advance)
                else:
                    deque(some, maxlen=0)
                number += 1
        shards = range(plan.first_shard, number)
        _wait_for(job.missing, shards)
        return shards


def _first_seen(number: int) -> Callable[[str, Any], tuple[Part, bytes]]:
    """Entries of a shard in the order in which their contents are seen."""
    seen: dict[bytes, int] = {}

    def entry_of(kind: str, part: Any) -> tuple[Part, bytes]:
        key = content_key(kind, part)
        return (number, seen.setdefault(key, len(seen))), key

    return entry_of


def _wait_for(missing: Callable[[Iterable[int]], list[int]], numbers: Iterable[int]) -> None:
    """Wait until other processes have made what they took on."""
    while numbers := missing(numbers):
        time.sleep(_PAUSE)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the folder of a store alone."""
    try:
        with lock_folder(folder, wait=False):
            yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another process is encoding into {str(folder)!r}: wait for it; processes that are to share the work are "
            "started by torchrun"
        ) from error
