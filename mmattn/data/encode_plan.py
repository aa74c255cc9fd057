"""The plan of an encoding: which contents the rows of a source have, and which shard holds each."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    Strict,
    VectorShard,
    read_description,
    read_rows_file,
    rows_name,
    rows_schema,
    shard_name,
    write_description,
    write_rows,
)
from mmattn.data.folders import first_few
from mmattn.data.readers import Rows
from mmattn.data.row import Row, RowEncoder, content_key, given_memory, parts_of
from mmattn.errors import ConfigError, import_extra
from mmattn.progress import counted
from mmattn.storage.files import FileFolder

if TYPE_CHECKING:
    import pyarrow as pa

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


class Report(Strict):
    """The content of `encoding/000007.json`: a shard that is done, and why pictures in it cannot be read."""

    shard: VectorShard
    rows_sha256: str
    broken: dict[int, str]


# Planning -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Arguments of `encode_rows`."""

    rows: Rows
    folder: Path
    encoders: Mapping[Kind, RowEncoder]
    infos: Mapping[Kind, EncoderInfo]
    source: str
    dim: int | None
    dtype: Any
    append: bool
    strict: bool
    batch_size: int
    contents_per_shard: int
    block_bytes: int
    progress: bool


def begin(request: Request) -> Plan | None:
    """Write the plan of an encoding, or read the one that is there; None if the rows are encoded already."""
    folder, source, fingerprint = request.folder, request.source, rows_fingerprint(request.rows, request.source)
    manifest, plan = read_description(FileFolder(folder), MANIFEST, Manifest), read_plan(folder)
    for begun in (manifest, plan):
        if begun is not None:
            _check_same(request, begun)
    encoded = {} if manifest is None else {one.fingerprint: one.name for one in manifest.sources}
    is_over = plan is None or plan.fingerprint in encoded
    if is_over and (folder / WORK).exists():  # killed when everything was done, or before there was a plan
        shutil.rmtree(folder / WORK)
        plan = None
    if plan is None and fingerprint in encoded:
        return None
    if plan is not None and plan.fingerprint != fingerprint:
        raise ConfigError(
            f"{str(folder)!r} was begun with {plan.source}, and the rows of {source} are others: go on with the same "
            "rows, or name another folder"
        )
    if plan is None and encoded and not request.append:
        raise ConfigError(
            f"{str(folder)!r} has the rows of {', '.join(encoded.values())}: name another folder, or add {source} to "
            "it with append=True"
        )
    return _make_plan(request, manifest, fingerprint) if plan is None else plan


def _check_same(request: Request, begun: Encoding) -> None:
    """Refuse other encoders, another width or dtype than the folder was begun with."""
    differing = [
        f"{kind} by {_named(info)}, now by {_named(request.infos[kind])}"
        for kind, info in begun.encoders.items()
        if kind in request.infos and request.infos[kind].fingerprint != info.fingerprint
    ]
    if request.dim not in (None, begun.dim):
        differing.append(f"dim={begun.dim}, now {request.dim}")
    if request.dtype != begun.dtype:
        differing.append(f"dtype={begun.dtype}, now {request.dtype}")
    if differing:
        raise ConfigError(
            f"{str(request.folder)!r} was encoded otherwise ({'; '.join(differing)}): give the same again, or another "
            "folder"
        )


def _named(encoder: EncoderInfo) -> str:
    return f"{encoder.name or 'an encoder'} ({encoder.fingerprint[:12]}…)"


def _make_plan(request: Request, manifest: Manifest | None, fingerprint: str) -> Plan:
    """Read all rows, and write them and the plan."""
    work, source = request.folder / WORK, request.source
    work.mkdir(exist_ok=True)
    reader = _RowReader(request.rows)
    if manifest is not None:
        reader.numbers, reader.next_content = EncodedDataset(request.folder).numbers_by_key(), manifest.contents
    first = reader.next_content
    try:
        total = len(request.rows) if isinstance(request.rows, Sequence) else None
        with counted(total, "reading rows", request.progress) as reader.advance:
            _, sha256 = write_rows(work / "rows.arrow", reader.batches(), rows_schema(with_numbers=True))
        dim = _common_width(request, manifest, reader)
    except ConfigError:
        shutil.rmtree(work)
        raise
    plan = Plan(
        dim=dim,
        dtype=request.dtype,
        encoders={kind: info for kind, info in request.infos.items() if kind in reader.kinds},
        saved_memories="memories" in reader.kinds,
        source=source,
        fingerprint=fingerprint,
        rows_sha256=sha256,
        total=reader.total,
        left_out=[*((-1, line) for line in getattr(request.rows, "left_out", ())), *reader.left_out],
        first_content=first,
        contents=reader.next_content - first,
        first_shard=0 if manifest is None else len(manifest.shards),
        contents_per_shard=request.contents_per_shard,
    )
    write_description(request.folder / PLAN, plan)
    return plan


def _common_width(request: Request, manifest: Manifest | None, reader: _RowReader) -> int:
    """Return the width of the dataset; refuse rows that cannot be encoded together."""
    source, dim = request.source, request.dim if manifest is None else manifest.dim
    count = len(reader.left_out)
    if count and (request.strict or count == reader.total):
        reasons = first_few([reason for _, reason in reader.left_out])
        raise ConfigError(f"{count} of {reader.total} rows of {source} cannot be used:\n{reasons}")
    missing = next((kind for kind in ("pictures", "passages") if kind in reader.kinds - set(request.encoders)), None)
    if missing is not None:
        raise ConfigError(f"rows of {source} have {missing}, and there is no encoder for them")
    widths = [*(encoder.dim for encoder in request.encoders.values()), *reader.saved_widths]
    if dim is None and not widths:
        raise ConfigError(f"the rows of {source} have no memory, and there is no encoder: give dim=")
    if dim is not None and max(widths, default=0) > dim:
        raise ConfigError(
            f"memories of {source} are {max(widths)} wide, and the dataset has {dim}: name another folder"
        )
    return max(widths) if dim is None else dim


@dataclass
class _RowReader:
    """Turns rows into record batches, and gives the next number to each content whose key is not in `numbers`."""

    rows: Rows
    numbers: dict[bytes, int] = field(default_factory=dict)
    next_content: int = 0
    total: int = 0
    left_out: list[tuple[int, str]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    saved_widths: list[int] = field(default_factory=list)
    advance: Callable[[int], None] = lambda count: None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Iterate over record batches of the usable rows."""
        pa = import_extra("pyarrow", "train")
        columns = self._columns()
        while some := list(itertools.islice(columns, _ROWS)):
            yield pa.RecordBatch.from_pylist(some, schema=rows_schema(with_numbers=True))

    def _columns(self) -> Iterator[dict[str, object]]:
        for number, row in rows_or_reasons(self.rows):
            self.total += 1
            self.advance(1)
            if isinstance(row, str):
                self.left_out.append((number, row))
                continue
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
            self.numbers[key] = self.next_content
            self.next_content += 1
        return self.numbers[key]


def rows_fingerprint(rows: Rows, source: str) -> str:
    """Return a fingerprint of the rows of a source; their pictures are not read."""
    if not isinstance(rows, Sequence):
        return hashlib.sha256(f"stream {source} {rows.columns} {rows.template}".encode()).hexdigest()
    if hasattr(rows, "fingerprint"):
        return str(rows.fingerprint)
    digest = hashlib.sha256()
    for row in rows:
        files = [_file(one) for one in (*row.images, row.memory)]
        digest.update(repr((row.text, row.prompt, row.passages, files)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _file(part: object) -> object:
    """Return name and size of a file, and the type of anything else."""
    return (part, os.stat(part).st_size) if isinstance(part, (str, os.PathLike)) else type(part).__name__


def rows_or_reasons(rows: Rows, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, Row | str]]:
    """Iterate over rows with their numbers, all or those of ascending `numbers`; a row of no use is its reason."""
    if not isinstance(rows, Sequence):
        chosen = None if numbers is None else set(numbers)
        yield from (pair for pair in enumerate(rows) if chosen is None or pair[0] in chosen)
        return
    for number in range(len(rows)) if numbers is None else numbers:
        try:
            yield number, rows[number]
        except ConfigError as error:
            yield number, str(error)


def finish(plan: Plan, folder: Path) -> None:
    """Write the rows without those that are left out, and then the manifest."""
    manifest = read_description(FileFolder(folder), MANIFEST, Manifest)
    reports = [one for number in plan.shards if (one := read_report(folder, plan, number)) is not None]
    broken = {number: why for report in reports for number, why in report.broken.items()}
    table = read_rows_file(FileFolder(folder / WORK), "rows.arrow", rows_schema(with_numbers=True), plan.rows_sha256)
    table, left_out = _without_broken(table, broken, plan) if broken else (table, plan.left_out)
    reasons = [line for _, line in sorted(left_out, key=lambda pair: pair[0])]
    if not len(table):
        for number in plan.shards:
            (folder / shard_name(number)).unlink()
        shutil.rmtree(folder / WORK)
        raise ConfigError(f"nothing of {plan.source} can be used:\n  " + "\n  ".join(reasons[:10]))
    sources, before = ([], []) if manifest is None else (manifest.sources, manifest.shards)
    batches = table.select(rows_schema().names).combine_chunks().to_batches()
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
        encoders=(manifest.encoders if manifest else {}) | plan.encoders,
        saved_memories=plan.saved_memories or (manifest is not None and manifest.saved_memories),
        sources=[*sources, source],
        shards=[*before, *(report.shard for report in reports)],
    )
    write_description(folder / MANIFEST, complete)
    shutil.rmtree(folder / WORK)


def _without_broken(table: pa.Table, broken: Mapping[int, str], plan: Plan) -> tuple[pa.Table, list[tuple[int, str]]]:
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
