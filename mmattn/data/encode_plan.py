"""The plan of an encoding: which contents the rows of a source have, and which shard holds each."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mmattn.data.encoded_dataset import EncodedDataset
from mmattn.data.encoded_files import (
    MANIFEST,
    PLAN,
    WORK,
    EncoderInfo,
    Encoding,
    Kind,
    Manifest,
    RowsFile,
    VectorShard,
    read_description,
    read_rows_file,
    rows_name,
    rows_schema,
    shard_name,
    write_description,
    write_rows,
)
from mmattn.data.file_folders import FileFolder
from mmattn.data.row_contents import content_key, given_memory, parts_of
from mmattn.data.rows import Row
from mmattn.errors import ConfigError, import_extra
from mmattn.progress import counted

_ROWS = 1 << 14


class Plan(Encoding):
    """The content of `encoding/plan.json`: shard number first_shard + i holds the i-th range of the new contents."""

    format: Literal["mmattn-encoding-plan"] = "mmattn-encoding-plan"
    format_version: Literal[1] = 1
    source: str
    fingerprint: str
    rows_sha256: str
    total: int = Field(ge=0)
    left_out: list[tuple[int, str]]
    first_content: int = Field(ge=0)
    contents: int = Field(ge=0)
    first_shard: int = Field(ge=0)
    contents_per_shard: int = Field(ge=1)

    @property
    def shards(self) -> range:
        """The numbers of the shards."""
        return range(self.first_shard, self.first_shard - (-self.contents // self.contents_per_shard))

    def contents_of(self, shard: int) -> range:
        """Return the numbers of the contents in a shard."""
        start = self.first_content + (shard - self.first_shard) * self.contents_per_shard
        return range(start, min(start + self.contents_per_shard, self.first_content + self.contents))


class Report(VectorShard):
    """The content of `encoding/000007.json`: a shard that is done, and why pictures in it cannot be read."""

    rows_sha256: str
    broken: dict[int, str]


# Planning -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planner:
    """Goes through the rows of a source and writes the plan of their encoding."""

    rows: Any
    folder: Path
    encoders: Mapping[Kind, EncoderInfo]
    source: str
    strict: bool
    progress: bool

    def begin(
        self, widths: Sequence[int], dim: int | None, dtype: Any, append: bool, contents_per_shard: int
    ) -> Plan | None:
        """Write the plan, or read the one that is there; None where the rows are encoded already."""
        files = FileFolder(self.folder)
        manifest, plan = read_description(files, MANIFEST, Manifest), read_plan(self.folder)
        for begun in (manifest, plan):
            if begun is not None:
                self._check_same(begun, dim, dtype)
        fingerprint = rows_fingerprint(self.rows, self.source)
        encoded = set() if manifest is None else {one.fingerprint for one in manifest.sources}
        if plan is not None and plan.fingerprint in encoded:  # killed when everything was done
            shutil.rmtree(self.folder / WORK)
            plan = None
        if plan is None and fingerprint in encoded:
            return None
        if plan is not None:
            if plan.fingerprint != fingerprint:
                raise ConfigError(
                    f"{str(self.folder)!r} was begun with {plan.source}, and the rows of {self.source} are others: go "
                    "on with the same rows, or name another folder"
                )
            return plan
        if manifest is not None and not append:
            sources = ", ".join(one.name for one in manifest.sources)
            raise ConfigError(
                f"{str(self.folder)!r} has the rows of {sources}: name another folder, or add {self.source} to it with "
                "append=True"
            )
        return self._plan(manifest, fingerprint, widths, dim, dtype, contents_per_shard)

    def _plan(
        self,
        manifest: Manifest | None,
        fingerprint: str,
        widths: Sequence[int],
        dim: int | None,
        dtype: Any,
        contents_per_shard: int,
    ) -> Plan:
        dim = manifest.dim if manifest is not None and dim is None else dim
        self._check_width(widths, dim)
        work = self.folder / WORK
        work.mkdir(exist_ok=True)
        numbers = {} if manifest is None else EncodedDataset(self.folder).numbers_by_key()
        first = 0 if manifest is None else manifest.contents
        reader = _RowReader(self.rows, numbers, first)
        total = len(self.rows) if isinstance(self.rows, Sequence) else None
        with counted(total, "reading rows", self.progress) as reader.advance:
            _, sha256 = write_rows(work / "rows.arrow", reader.batches(), rows_schema(with_numbers=True))
        self._check_usable(reader)
        missing = next((kind for kind in ("pictures", "passages") if kind in reader.kinds - set(self.encoders)), None)
        if missing is not None:
            raise ConfigError(f"rows of {self.source} have {missing}, and there is no encoder for them")
        widths = [*widths, *reader.saved_widths]
        if dim is None and not widths:
            raise ConfigError(f"the rows of {self.source} have no memory, and there is no encoder: give dim=")
        self._check_width(widths, dim)
        plan = Plan(
            dim=max(widths) if dim is None else dim,
            dtype=dtype,
            encoders={kind: info for kind, info in self.encoders.items() if kind in reader.kinds},
            saved_memories="memories" in reader.kinds,
            source=self.source,
            fingerprint=fingerprint,
            rows_sha256=sha256,
            total=reader.total,
            left_out=reader.left_out,
            first_content=first,
            contents=reader.contents,
            first_shard=0 if manifest is None else len(manifest.shards),
            contents_per_shard=contents_per_shard,
        )
        write_description(self.folder / PLAN, plan)
        return plan

    def _check_usable(self, reader: _RowReader) -> None:
        """Refuse rows of which none can be used, or with `strict` not all; leave nothing behind."""
        unusable = [reason for number, reason in reader.left_out if number >= 0 or not reader.usable]
        if not unusable or (reader.usable and not self.strict):
            return
        shutil.rmtree(self.folder / WORK)
        with contextlib.suppress(OSError):  # another dataset is there
            self.folder.rmdir()
        reasons = "\n  ".join(unusable[:10] + ["…"] * (len(unusable) > 10))
        raise ConfigError(
            f"{len(unusable)} of {reader.total} rows of {self.source} cannot be used:\n  {reasons}\n"
            "repair them, or leave them out"
        )

    def _check_width(self, widths: Sequence[int], dim: int | None) -> None:
        if dim is not None and max(widths, default=0) > dim:
            raise ConfigError(
                f"memories of {self.source} are {max(widths)} wide, and the dataset has {dim}: name another folder"
            )

    def _check_same(self, begun: Encoding, dim: int | None, dtype: str) -> None:
        """Refuse other encoders, another width or dtype than the folder was begun with."""
        differing = [
            f"{kind} by {_named(info)}, now by {_named(self.encoders[kind])}"
            for kind, info in begun.encoders.items()
            if kind in self.encoders and self.encoders[kind].fingerprint != info.fingerprint
        ]
        if dim not in (None, begun.dim):
            differing.append(f"dim={begun.dim}, now {dim}")
        if dtype != begun.dtype:
            differing.append(f"dtype={begun.dtype}, now {dtype}")
        if differing:
            raise ConfigError(
                f"{str(self.folder)!r} was encoded otherwise ({'; '.join(differing)}): give the same again, or another "
                "folder"
            )


class _RowReader:
    """Turns rows into record batches, and gives the next number to each content whose key is not in `numbers`."""

    def __init__(self, rows: Any, numbers: dict[bytes, int], first: int) -> None:
        self.rows, self.numbers, self.first = rows, numbers, first
        self.advance: Callable[[int], None] = lambda count: None
        self.contents = self.total = self.usable = 0
        self.left_out: list[tuple[int, str]] = []
        self.kinds: set[str] = set()
        self.saved_widths: list[int] = []

    def batches(self) -> Iterator[Any]:
        """Iterate over record batches of the usable rows."""
        pa = import_extra("pyarrow", "train")
        columns = self._columns()
        while some := list(itertools.islice(columns, _ROWS)):
            yield pa.RecordBatch.from_pylist(some, schema=rows_schema(with_numbers=True))
        self.left_out = [*((-1, line) for line in getattr(self.rows, "left_out", ())), *self.left_out]

    def _columns(self) -> Iterator[dict[str, Any]]:
        for number, row in rows_or_reasons(self.rows):
            self.total += 1
            self.advance(1)
            if isinstance(row, str):
                self.left_out.append((number, row))
                continue
            self.usable += 1
            parts = parts_of(row)
            self.kinds |= {kind for kind, _ in parts}
            if row.memory is not None and not self.saved_widths:
                self.saved_widths.append(given_memory(row.memory).dim)
            keys = [content_key(kind, part) for kind, part in parts]
            yield {
                "text": row.text,
                "prompt": row.prompt,
                "contents": [self._number(key) for key in keys],
                "keys": keys,
                "files": [os.fsencode(image) for image in row.images if isinstance(image, str)],
                "id": row.id,
                "metadata": None if row.metadata is None else json.dumps(row.metadata, ensure_ascii=False),
                "number": number,
            }

    def _number(self, key: bytes) -> int:
        if key not in self.numbers:
            self.numbers[key] = self.first + self.contents
            self.contents += 1
        return self.numbers[key]


def rows_fingerprint(rows: Any, source: str) -> str:
    """Return a fingerprint of the rows of a source; their pictures are not read."""
    if not isinstance(rows, Sequence):
        settings = f"stream {source} {rows.columns} {rows.template} {rows.skip} {rows.take}"
        return hashlib.sha256(settings.encode()).hexdigest()
    if hasattr(rows, "fingerprint"):
        return str(rows.fingerprint)
    digest = hashlib.sha256()
    for row in rows:
        files = [_file(one) for one in (*row.images, row.memory)]
        digest.update(repr((row.text, row.prompt, row.passages, files)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _file(part: Any) -> Any:
    """Return name and size of a file, and the type of anything else."""
    return (part, os.stat(part).st_size) if isinstance(part, (str, os.PathLike)) else type(part).__name__


def _named(encoder: EncoderInfo) -> str:
    return f"{encoder.name or 'an encoder'} ({encoder.fingerprint[:12]}…)"


def rows_or_reasons(rows: Any, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, Row | str]]:
    """Iterate over rows with their numbers, all or those of ascending `numbers`; a row of no use is its reason."""
    if not isinstance(rows, Sequence):
        wanted = None if numbers is None else set(numbers)
        yield from (pair for pair in enumerate(rows) if wanted is None or pair[0] in wanted)
        return
    for number in range(len(rows)) if numbers is None else numbers:
        try:
            yield number, rows[number]
        except ConfigError as error:
            yield number, str(error)


def finish(plan: Plan, folder: Path) -> None:
    """Write the rows without those that are left out, and then the manifest."""
    manifest = read_description(FileFolder(folder), MANIFEST, Manifest)
    reports = [read_report(folder, plan, number) for number in plan.shards]
    broken = {number: why for report in reports if report is not None for number, why in report.broken.items()}
    table = read_rows_file(FileFolder(folder / WORK), "rows.arrow", rows_schema(with_numbers=True), plan.rows_sha256)
    table, left_out = _without_broken(table, broken, plan) if broken else (table, plan.left_out)
    reasons = [line for _, line in sorted(left_out, key=lambda pair: pair[0])]
    if not len(table):
        for number in plan.shards:
            (folder / shard_name(number)).unlink()
        shutil.rmtree(folder / WORK)
        raise ConfigError(f"nothing of {plan.source} can be used:\n  " + "\n  ".join(reasons[:10]))
    sources, shards, encoders, saved = [], [], {}, False
    if manifest is not None:
        sources, shards = manifest.sources, manifest.shards
        encoders, saved = manifest.encoders, manifest.saved_memories
    batches = table.select(rows_schema().names).combine_chunks().to_batches()
    made = [VectorShard(**one.model_dump(include=set(VectorShard.model_fields))) for one in reports if one is not None]
    size, sha256 = write_rows(folder / rows_name(len(sources)), batches, rows_schema())
    source = RowsFile(
        name=plan.source,
        fingerprint=plan.fingerprint,
        rows=len(table),
        total=plan.total,
        left_out=reasons,
        size=size,
        sha256=sha256,
    )
    complete = Manifest(
        dim=plan.dim,
        dtype=plan.dtype,
        encoders={**encoders, **plan.encoders},
        saved_memories=plan.saved_memories or saved,
        sources=[*sources, source],
        shards=[*shards, *made],
    )
    write_description(folder / MANIFEST, complete)
    shutil.rmtree(folder / WORK)


def _without_broken(table: Any, broken: Mapping[int, str], plan: Plan) -> tuple[Any, list[tuple[int, str]]]:
    """Return the rows whose contents could all be read, and the reasons of all others."""
    pa = import_extra("pyarrow", "train")
    left_out, usable = list(plan.left_out), []
    for row in table.select(["contents", "files", "number"]).to_pylist():
        why = next((broken[number] for number in row["contents"] if number in broken), None)
        usable.append(why is None)
        if why is not None:
            files = [os.fsdecode(file) for file in row["files"]]
            named = any(file in why for file in files)
            where = f"row {row['number']} of {plan.source}" + f" ({', '.join(files)})" * bool(files)
            left_out.append((row["number"], why if named else f"{where}: {why}"))
    return table.filter(pa.array(usable)), left_out


def read_plan(folder: Path) -> Plan | None:
    if not (folder / WORK).is_dir():
        return None
    return read_description(FileFolder(folder / WORK), Path(PLAN).name, Plan)


def report_path(folder: Path, shard: int) -> Path:
    return folder / WORK / f"{shard:06d}.json"


def read_report(folder: Path, plan: Plan, shard: int) -> Report | None:
    """Return the report of a shard, or None where it is not done."""
    path = report_path(folder, shard)
    try:
        report = Report.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return report if report.rows_sha256 == plan.rows_sha256 else None


def is_complete(folder: Path, fingerprint: str) -> bool:
    manifest = read_description(FileFolder(folder), MANIFEST, Manifest)
    return manifest is not None and fingerprint in {one.fingerprint for one in manifest.sources}
