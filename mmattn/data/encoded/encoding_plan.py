"""The beginning and the end of an encoding: what a folder holds, what is to be added to it, what became of that."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.data.encoded.encoding_job import CONTENTS, rows_or_reasons
from mmattn.data.encoded.manifest import (
    KINDS,
    MANIFEST,
    PLAN,
    Kind,
    Manifest,
    Plan,
    StoredEncoder,
    StoredShard,
    StoredSource,
    read_description,
    write_description,
)
from mmattn.data.encoded.shards import DTYPES, open_shard, read_shard_header, shard_name
from mmattn.data.file_folders import FileFolder
from mmattn.data.row_contents import encode_parts, encoded_parts, given_memory
from mmattn.data.rows import Row
from mmattn.errors import ConfigError

SHARD_BYTES = 512 << 20
"""Vectors of a shard, about."""
MOST_ROWS = 1 << 16
"""Rows of a shard at most, where their vectors are small."""
_SAMPLE = 32


def begin(
    rows: Any,
    folder: Path,
    encoders: Mapping[Kind, Any],
    described: Mapping[Kind, StoredEncoder],
    *,
    dim: int | None,
    dtype: Any,
    source: str,
    append: bool,
    batch_size: int,
    rows_per_shard: int | None,
    block_bytes: int,
) -> None:
    """Write the plan of an encoding, or find it; where nothing is to be done there is none afterwards.

    Args:
        rows: of the source.
        folder: of the store.
        encoders: of the rows.
        described: what the store says of them.
        dim: as in `encode_rows`.
        dtype: as in `encode_rows`.
        source: as in `encode_rows`.
        append: as in `encode_rows`.
        batch_size: as in `encode_rows`.
        rows_per_shard: as in `encode_rows`.
        block_bytes: as in `encode_rows`.

    Raises:
        ConfigError: the folder holds something else.
    """
    files = FileFolder(folder)
    manifest, plan = read_description(files, MANIFEST, Manifest), read_description(files, PLAN, Plan)
    fingerprint = rows_fingerprint(rows, source)
    for begun in (manifest, plan):
        if begun is not None:
            _check_same(folder, begun, described, dim, dtype)
    there = set() if manifest is None else {one.fingerprint for one in manifest.sources}
    if plan is not None and plan.fingerprint in there:  # killed when all was done
        _remove_plan(folder)
        plan = None
    if plan is None and fingerprint in there:
        return
    if plan is not None:
        if plan.fingerprint != fingerprint or rows_per_shard not in (None, plan.rows_per_shard):
            raise ConfigError(
                f"{str(folder)!r} was begun with {plan.source} ({plan.rows_per_shard} rows in a shard), and something "
                f"else is given ({source}): go on with the same rows and settings, or name another folder"
            )
        return
    if manifest is not None and not append:
        held = ", ".join(one.name for one in manifest.sources)
        raise ConfigError(
            f"{str(folder)!r} is a store of {held}: name another folder, or add {source} to it with append=True"
        )
    first = _first(rows, _SAMPLE)
    given = [given_memory(row.memory) for row in first if row.memory is not None]
    widths = [*(encoder.dim for encoder in encoders.values()), *(memory.dim for memory in given)]
    if dim is None:
        if manifest is None and not widths:
            raise ConfigError(f"the first rows of {source} have no memory, and there is no encoder: give dim=")
        dim = max(widths) if manifest is None else manifest.dim
    if max(widths, default=0) > dim:
        raise ConfigError(f"memories of {source} are {max(widths)} wide, and the store has {dim}: name another folder")
    if rows_per_shard is None:
        slots = sum(memory.length for memory in given) + _slots(first, encoders, batch_size)
        row_bytes = slots * dim * DTYPES[dtype].itemsize / max(1, len(first))
        rows_per_shard = MOST_ROWS if not row_bytes else max(1, min(MOST_ROWS, round(SHARD_BYTES / row_bytes)))
    made = Plan(
        dim=dim,
        dtype=dtype,
        encoders=dict(described),
        source=source,
        fingerprint=fingerprint,
        rows=len(rows) if isinstance(rows, Sequence) else None,
        first_shard=0 if manifest is None else len(manifest.shards),
        rows_per_shard=rows_per_shard,
        block_bytes=block_bytes,
    )
    write_description(folder / PLAN, made)


def finish(plan: Plan, folder: Path, shards: range, left_out: Sequence[str]) -> None:
    """Write the manifest of a store, whose shards are all there.

    Args:
        plan: of the last of them.
        folder: of the store.
        shards: numbers of those of the plan.
        left_out: what could not be used of the source before anything was encoded.

    Raises:
        ConfigError: nothing of the source could be used; the folder is as it was before.
    """
    files = FileFolder(folder)
    earlier = read_description(files, MANIFEST, Manifest)
    opened = [open_shard(files, number) for number in shards]
    about = [read_shard_header(one) for one in opened]
    left_out = [*left_out, *(line for one in about for line in one.left_out)]
    made = [
        StoredShard(blocks=said.blocks, size=files.sizes[one.name], sha256=one.sha256)
        for one, said in zip(opened, about, strict=True)
    ]
    if not sum(block[0] for one in made for block in one.blocks):
        for number in shards:
            (folder / shard_name(number)).unlink()
        _remove_plan(folder)
        raise ConfigError(f"nothing of {plan.source} can be used:\n  " + "\n  ".join(left_out[:10]))
    kinds = {kind for one in about for kind in one.kinds}
    encoders = {} if earlier is None else dict(earlier.encoders)
    encoders |= {kind: plan.encoders[kind] for kind in KINDS if kind in kinds}
    rows = sum(one.rows for one in about)
    source = StoredSource(
        name=plan.source, fingerprint=plan.fingerprint, rows=rows, shards=len(shards), left_out=left_out
    )
    squares = [sum(one.squares[i] for one in about) + (earlier.squares[i] if earlier else 0) for i in (0, 1)]
    manifest = Manifest(
        dim=plan.dim,
        dtype=plan.dtype,
        encoders=encoders,
        given_memories="memories" in kinds or (earlier is not None and earlier.given_memories),
        sources=[*(earlier.sources if earlier else []), source],
        shards=[*(earlier.shards if earlier else []), *made],
        squares=(squares[0], squares[1]),
    )
    write_description(folder / MANIFEST, manifest)
    _remove_plan(folder)


def rows_fingerprint(rows: Any, source: str) -> str:
    """What tells the rows of one source from those of another, without reading their pictures.

    Args:
        rows: of the source.
        source: its name, of a stream.
    """
    if not isinstance(rows, Sequence):
        return hashlib.sha256(
            f"stream {source} {rows.columns} {rows.template} {rows.skip} {rows.take}".encode()
        ).hexdigest()
    if hasattr(rows, "fingerprint"):
        return str(rows.fingerprint)
    digest = hashlib.sha256()
    for row in rows:
        files = [_file(one) for one in (*row.images, row.memory)]
        digest.update(repr((row.text, row.prompt, row.passages, files)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _file(part: Any) -> Any:
    """A file by its name and size, anything else by its type."""
    return (part, os.stat(part).st_size) if isinstance(part, (str, os.PathLike)) else type(part).__name__


def _first(rows: Any, count: int) -> list[Row]:
    """The first rows of a source, without those that cannot be used."""
    if not isinstance(rows, Sequence):
        return list(itertools.islice(rows, count))
    return [row for row in rows_or_reasons(rows, range(min(count, len(rows))), False) if isinstance(row, Row)]


def _slots(rows: Sequence[Row], encoders: Mapping[Kind, Any], batch_size: int) -> int:
    """The number of slots of what is encoded of these rows."""
    parts = [one for row in rows for one in encoded_parts(row)]
    slots = 0
    for kind, encoder in encoders.items():
        own = [part for other, part in parts if other == kind]
        vectors = encode_parts(encoder, own, batch_size, skip_broken=True) if own else []
        slots += sum(len(one) for one in vectors if one is not None)
    return slots


def _check_same(
    folder: Path, begun: Manifest | Plan, described: Mapping[Kind, StoredEncoder], dim: int | None, dtype: str
) -> None:
    """Refuse other encoders, another width or another dtype than what is there was made with."""
    differing = [
        f"{kind} by {_named(encoder)}, now by {_named(described[kind])}"
        for kind, encoder in begun.encoders.items()
        if kind in described and described[kind].fingerprint != encoder.fingerprint
    ]
    if dim not in (None, begun.dim):
        differing.append(f"dim={begun.dim}, now {dim}")
    if dtype != begun.dtype:
        differing.append(f"dtype={begun.dtype}, now {dtype}")
    if differing:
        raise ConfigError(
            f"{str(folder)!r} holds memories that were made otherwise ({'; '.join(differing)}): give the same again, "
            "or another folder"
        )


def _named(encoder: StoredEncoder) -> str:
    return f"{encoder.name or 'an encoder'} ({encoder.fingerprint[:12]}…)"


def _remove_plan(folder: Path) -> None:
    # The plan last: as long as it is there, the same command comes here again.
    shutil.rmtree(folder / CONTENTS, ignore_errors=True)
    (folder / PLAN).unlink()
