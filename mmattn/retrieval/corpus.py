"""A corpus embedded into shards: a job that may be killed and resumed, by one process, by many, or on Ray.

Every shard is made from its own lines alone and written in one step, so it is the same whoever makes it and however
often the job was interrupted. Workers need not talk to each other: they take shards by number and see in the folder
what is done, and whichever finds it complete writes the manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import (
    ConfigError,
    IndexMismatchError,
    TextError,
    check_choice,
    check_int,
    import_extra,
)
from mmattn.progress import counted
from mmattn.retrieval.corpus_lines import LineFiles, Stretch
from mmattn.retrieval.corpus_shards import (
    FORMAT,
    MANIFEST,
    PLAN,
    CorpusShards,
    dump_plan,
    read_plan,
    shard_name,
    write_description,
)
from mmattn.retrieval.ray_workers import run_on_ray
from mmattn.storage.files import replacing
from mmattn.storage.fingerprints import file_fingerprint

#: Batches of texts that the encoder gets at once: enough to sort them by length, few enough to show progress.
_BATCHES = 16


def embed_corpus(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    encoder: Any,
    *,
    field: str = "text",
    id_field: str | None = None,
    lines_per_shard: int = 10_000,
    batch_size: int = 32,
    skip_broken: bool = False,
    executor: str = "local",
    progress: bool = False,
) -> CorpusShards:
    """Embed a corpus into shards in a folder, going on where an earlier call ended.

    Under torchrun (or wherever RANK and WORLD_SIZE are set) each process takes its share of the shards and returns when
    these are done, which may be before the others are: see `CorpusShards.complete`.

    Args:
        files: JSON lines (.jsonl, .ndjson) or plain text files, one text per line; blank lines are passed over.
        out: the folder, created where there is none.
        encoder: has `encode(texts, batch_size=)` that gives a Memory of one slot per text, `dim` and `fingerprint`.
        field: of a JSON line, what holds the text; what else it holds becomes metadata.
        id_field: of a JSON line, what names it; by default a line is named "file name:number".
        lines_per_shard: lines of each shard.
        batch_size: texts the encoder reads at once.
        skip_broken: leave out lines that hold no text (no UTF-8, no JSON, no such field, NUL or a carriage return
            within it, more than 16 MiB) instead of refusing them.
        executor: "local", this process; or "ray", the workers of a Ray cluster, which must see `files` and `out`.
        progress: show the lines done.

    Raises:
        TextError: broken lines, by file and number; or no line has a text.
        IndexMismatchError: `out` was begun with another encoder, corpus or setting.
        ConfigError: a setting outside what is allowed, or an encoder of several slots per text.
        MissingExtraError: pyarrow or ray is not installed.
        OSError: the disk is full, or `out` is not writable.

    >>> import tempfile
    >>> from mmattn.encoders import TextEncoder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "flowers.txt"
    ...     _ = file.write_text("Bluebells flower in April.\\nDaisies flower all year.\\n")
    ...     shards = embed_corpus(file, Path(folder) / "out", TextEncoder())
    ...     for ids, texts, metadata, vectors in shards:
    ...         print(ids, texts[1], metadata, vectors.shape)
    ['flowers.txt:1', 'flowers.txt:2'] Daisies flower all year. [{}, {}] torch.Size([2, 384])
    """
    check_int("lines_per_shard", lines_per_shard)
    check_int("batch_size", batch_size)
    check_choice("executor", executor, ("local", "ray"))
    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    lines = LineFiles(tuple(Path(file).absolute() for file in given), field, id_field)
    survey = lines.survey(lines_per_shard)
    faults = survey.faults
    if faults and not skip_broken:
        shown = "\n  ".join(faults[:5] + ["…"] * (len(faults) > 5))
        raise TextError(
            f"{len(faults)} lines of the corpus hold no text:\n  {shown}\nrepair them, or leave them out with "
            "skip_broken=True"
        )
    if not survey.rows:
        names = ", ".join(file.name for file in lines.files[:5]) + ", …" * (len(lines.files) > 5)
        broken = f"; {len(faults)} broken lines were left out" if faults else ", only blank lines or nothing at all"
        raise TextError(f"there is nothing to embed: {names} hold no text{broken}")
    plan = {
        "format": FORMAT,
        "format_version": 1,
        "encoder": encoder.fingerprint,
        "dim": encoder.dim,
        "files": survey.hashes,
        "settings": {"field": field, "id_field": id_field, "lines_per_shard": lines_per_shard},
        "skipped": faults,
        "stretches": [asdict(stretch) for stretch in survey.stretches],
    }
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / PLAN).exists():
        _refuse_other(folder, read_plan(folder / PLAN), plan)
    else:
        write_description(folder / PLAN, plan)
    job = _Job(lines, folder, encoder, batch_size, survey.stretches, hashlib.sha256(dump_plan(plan)).hexdigest())
    todo = missing = job.missing()
    if executor == "local":
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        todo = [number for number in todo if number % world == rank]
    with counted(sum(job.stretches[number].count for number in todo), "embedding lines", progress) as advance:
        if executor == "ray":
            on = getattr(encoder, "device", torch.device("cpu"))
            run_on_ray(job.make, todo, on, lambda number: advance(job.stretches[number].count))
        else:
            for number in todo:
                job.make(number, advance)
    if (missing or not (folder / MANIFEST).exists()) and not job.missing():
        write_description(folder / MANIFEST, {"format": FORMAT, "format_version": 1, "shards": job.described()})
    return CorpusShards(folder)


@dataclass(frozen=True)
class _Job:
    """What computes and writes a shard, in any process."""

    lines: LineFiles
    folder: Path
    encoder: Any
    batch_size: int
    stretches: list[Stretch]
    plan: str

    def missing(self) -> list[int]:
        """The shards that are not there, or are of no use."""
        return [number for number in range(len(self.stretches)) if self._rows(number) is None]

    def described(self) -> list[dict[str, Any]]:
        """Rows and sha256 of each shard."""
        numbers = range(len(self.stretches))
        return [{"rows": self._rows(n), "sha256": file_fingerprint(self.folder / shard_name(n))} for n in numbers]

    def make(self, number: int, advance: Callable[[int], None] = lambda count: None) -> None:
        """Embed the lines of a shard and write it, in one step; `advance` is told how many are done."""
        pyarrow, parquet = import_extra("pyarrow", "scale"), import_extra("pyarrow.parquet", "scale")
        stretch = self.stretches[number]
        rows = list(self.lines.rows(stretch))
        vectors = [torch.empty(0, self.encoder.dim)]
        for start in range(0, len(rows), _BATCHES * self.batch_size):
            some = rows[start : start + _BATCHES * self.batch_size]
            vectors.append(self._embedded(stretch, [row.text for row in some]))
            advance(len(some))
        advance(stretch.count - len(rows))
        flat = pyarrow.array(torch.cat(vectors).numpy().reshape(-1))
        table = pyarrow.table(
            {
                "id": pyarrow.array([row.id for row in rows], pyarrow.string()),
                "text": pyarrow.array([row.text for row in rows], pyarrow.string()),
                "metadata": pyarrow.array(
                    [json.dumps(row.metadata, ensure_ascii=False) for row in rows], pyarrow.string()
                ),
                "vector": pyarrow.FixedSizeListArray.from_arrays(flat, self.encoder.dim),
            }
        )
        buffer = io.BytesIO()
        parquet.write_table(table.replace_schema_metadata({"plan": self.plan}), buffer)
        with replacing(self.folder / shard_name(number)) as file:
            file.write(buffer.getbuffer())

    def _embedded(self, stretch: Stretch, texts: list[str]) -> Tensor:
        """The vectors (n, e) of texts of a stretch."""
        try:
            memory = self.encoder.encode(texts, batch_size=self.batch_size)
        except TextError as error:
            name = self.lines.files[stretch.file].name
            raise TextError(f"a text of {name} from line {stretch.first} on cannot be embedded: {error}") from error
        if memory.length != 1:
            raise ConfigError(
                f"a row of the corpus has one vector, and the encoder gave {memory!r}; use an encoder that pools"
            )
        memory.check_finite()
        return memory.tokens[:, 0].float().cpu()

    def _rows(self, number: int) -> int | None:
        """How many rows a shard has; None if it is missing, torn, or of another plan."""
        pyarrow, parquet = import_extra("pyarrow", "scale"), import_extra("pyarrow.parquet", "scale")
        path = self.folder / shard_name(number)
        try:
            found = parquet.read_metadata(path)
        except (OSError, pyarrow.ArrowInvalid):
            return None
        kept = (found.metadata or {}).get(b"plan", b"")
        return int(found.num_rows) if kept == self.plan.encode() else None


def _refuse_other(folder: Path, begun: dict[str, Any], plan: dict[str, Any]) -> None:
    """Refuse a folder that was begun with something else, by its name."""
    advice = f"give another folder, or delete {str(folder)!r}"
    for name in ("encoder", "dim"):
        if begun[name] != plan[name]:
            raise IndexMismatchError(
                f"{str(folder)!r} holds vectors of another encoder ({name} {begun[name]}, and this one has "
                f"{plan[name]}); {advice}"
            )
    names = dict.fromkeys([*begun["files"], *plan["files"]])
    changed = [name for name in names if begun["files"].get(name) != plan["files"].get(name)]
    if changed or list(begun["files"]) != list(plan["files"]):
        raise IndexMismatchError(
            f"{str(folder)!r} was begun with another corpus: {', '.join(changed[:5]) or 'the order of the files'} "
            f"changed; {advice}"
        )
    for name, value in plan["settings"].items():
        if begun["settings"][name] != value:
            raise IndexMismatchError(
                f"{str(folder)!r} was begun with {name}={begun['settings'][name]!r}, and now it is {value!r}; {advice}"
            )
