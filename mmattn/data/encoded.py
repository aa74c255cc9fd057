"""Encode the memories of a dataset: `Dataset.map` with frozen encoders, in shards that a killed run finds again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mmattn.data.readers import Rows, files_of, memory_kinds, undecoded_pictures
from mmattn.data.rows import COLUMNS, MEMORY, Row, make_row, row_memory
from mmattn.encoders import load_image
from mmattn.errors import ConfigError, ImageError, MmattnError, check_choice, check_int, import_extra
from mmattn.memory import Memory

if TYPE_CHECKING:
    from datasets import Dataset, Features

ROWS_PER_SHARD = 4096
DTYPES = {"float16": torch.float16, "float32": torch.float32}
_BATCHES = 8
"""Batches of an encoder that `map` hands over at once: enough to sort texts by length."""


class RowEncoder(Protocol):
    """An encoder of pictures or passages; it makes a row of a memory of each."""

    @property
    def dim(self) -> int:
        """Width e of the vectors."""

    @property
    def fingerprint(self) -> str:
        """A fingerprint of weights and settings."""

    def __call__(self, contents: Any, /, *, batch_size: int) -> Memory:
        """Return the memory (n, m, e) of n pictures or passages."""


@dataclass(frozen=True)
class EncoderInfo:
    """The encoder of all pictures or all passages of a dataset.

    Attributes:
        fingerprint: of its weights and settings.
        name: under which it was loaded.
        pooled: one slot for each picture.
        pooling: of passages.
        grid: rows and columns of the slots of a picture.
    """

    fingerprint: str
    name: str | None = None
    pooled: bool = False
    pooling: str | None = None
    grid: Sequence[int] | None = None


@dataclass(frozen=True)
class Encoding:
    """The encoders that made the memories of a dataset.

    Attributes:
        dim: width e of the vectors.
        encoders: of "pictures" and "passages", where rows had them.
        saved_memories: rows came with vectors.
    """

    dim: int
    encoders: Mapping[str, EncoderInfo]
    saved_memories: bool

    @property
    def fingerprint(self) -> str | None:
        """A fingerprint of the encoders; None where there were none."""
        kinds = ("pictures", "passages")
        fingerprints = [self.encoders[kind].fingerprint for kind in kinds if kind in self.encoders]
        if len(fingerprints) < 2:
            return fingerprints[0] if fingerprints else None
        return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()


def encode_dataset(
    dataset: Rows,
    folder: str | os.PathLike[str],
    *,
    pictures: RowEncoder | None = None,
    passages: RowEncoder | None = None,
    host: str = "language",
    dim: int | None = None,
    dtype: str = "float16",
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    batch_size: int = 32,
    rows_per_shard: int = ROWS_PER_SHARD,
    num_proc: int | None = None,
) -> Rows:
    """Encode the pictures, passages and saved memories of rows by `Dataset.map`, and return them as vectors.

    Replaces the columns of pictures and passages with `memory` (m, e), padded with zeros to the widest encoder,
    `segments` (m,), which number the pictures and passages of a row, `scores` (m,) of saved memories, and `sources`,
    the file of each picture and the text of each passage. `with_format("torch")` returns tensors.

    Each shard is a file in the folder. A later call with the same rows (including the size and time of their files),
    encoders and settings reuses it, so a run that was killed continues at its last shard.

    Args:
        dataset: a dataset with the columns of rows, such as from `read_rows`. A stream is encoded while it is read.
        folder: folder of the shards, created if missing; a stream writes none.
        pictures: encoder of pictures; None without pictures.
        passages: encoder of passages; None without passages.
        host: "language" or "unet"; for a UNet the column `image`, the picture to draw, stays.
        dim: width e of the vectors; by default that of the widest encoder or saved memory.
        dtype: dtype of the vectors, "float16" or "float32".
        names: names of the encoders of "pictures" and "passages".
        strict: raise for an unusable row. False keeps it with an empty memory and the reason in the column `error`, for
            `drop_errors`.
        batch_size: number of pictures or passages encoded together.
        rows_per_shard: number of rows of a shard.
        num_proc: number of processes, as in `Dataset.map`; with several GPUs each process uses one.

    Raises:
        ConfigError: no rows, an unusable row (with its number), no encoder for the contents of rows, or an encoder
            wider than `dim`.
        ImageError: an unreadable picture (with the number of its row).
        OSError: the disk is full, or the folder is not writable.

    >>> import tempfile
    >>> from datasets import Dataset
    >>> from mmattn.encoders import TextEncoder
    >>> flowers = Dataset.from_dict({"text": ["blue", "red"], "passage": ["Bluebells are blue.", "Poppies are red."]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     encoded = encode_dataset(flowers, folder, passages=TextEncoder()).with_format("torch")
    ...     encoded[1]["text"], encoded[1]["memory"].shape
    ('red', torch.Size([1, 384]))
    """
    datasets = import_extra("datasets", "train")
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("host", host, tuple(COLUMNS))
    check_int("batch_size", batch_size)
    check_int("rows_per_shard", rows_per_shard)
    given = {"pictures": pictures, "passages": passages}
    encoders = {kind: encoder for kind, encoder in given.items() if encoder is not None}
    if dataset.features is None:  # of a stream
        dataset = dataset._resolve_features()
    dataset, kinds = undecoded_pictures(dataset), memory_kinds(dataset, host)
    if missing := kinds - {"memories", *encoders}:
        raise ConfigError(f"rows have {' and '.join(sorted(missing))}, and there is no encoder for them")
    width = _width(dataset, encoders, dim)
    options: dict[str, Any] = {"encoders": encoders, "host": host, "dim": width, "dtype": dtype}
    options |= {"strict": strict, "batch_size": batch_size}
    removed = _removed(dataset, host)
    features = _features(dataset, removed, width, dtype, strict)
    mapping: dict[str, Any] = {"batched": True, "batch_size": _BATCHES * batch_size, "with_indices": True}
    mapping |= {"remove_columns": removed, "features": features}
    described = {kind: _describe(encoders[kind], (names or {}).get(kind)) for kind in sorted(kinds & set(encoders))}
    description = json.dumps({"encoders": described, "saved_memories": "memories" in kinds})
    if isinstance(dataset, datasets.IterableDataset):
        stream = dataset.map(_encode_batch, fn_kwargs={**options, "first": 0}, **mapping)
        stream.info.description = description
        return stream
    if not len(dataset):
        raise ConfigError("there are no rows to encode")
    about: list[object] = [kind + encoder.fingerprint for kind, encoder in encoders.items()]
    about += [dataset._fingerprint, host, width, dtype, strict, rows_per_shard, *_file_states(dataset)]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    Path(folder).mkdir(parents=True, exist_ok=True)
    shards, count = [], max(1, -(-len(dataset) // rows_per_shard))
    for number in range(count):
        shard = dataset.select(range(number * rows_per_shard, min((number + 1) * rows_per_shard, len(dataset))))
        encoded = shard.map(
            _encode_batch,
            fn_kwargs={**options, "first": number * rows_per_shard},
            with_rank=True,
            num_proc=num_proc,
            cache_file_name=str(Path(folder) / f"{key}-{number:05d}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=f"{key}-{number:05d}",
            desc=f"encoding, shard {number + 1} of {count}",
            **mapping,
        )
        encoded.info.description = description
        shards.append(encoded)
    return datasets.concatenate_datasets(shards)


def drop_errors(dataset: Dataset) -> tuple[Dataset, list[str]]:
    """Return the rows that could be encoded, and the reasons why the others could not.

    Args:
        dataset: that `encode_dataset` made with `strict=False`.

    Raises:
        ConfigError: no row is left.
    """
    errors = list(dataset["error"])
    usable, reasons = [n for n, error in enumerate(errors) if error is None], [error for error in errors if error]
    if not usable:
        raise ConfigError(f"no row can be used:\n{first_few(reasons)}")
    return (dataset.select(usable) if reasons else dataset).remove_columns("error"), reasons


def first_few(reasons: Sequence[str], shown: int = 10) -> str:
    """Return the first reasons, a line each, and how many there are besides."""
    more = f"\n  and {len(reasons) - shown} more" if len(reasons) > shown else ""
    return "  " + "\n  ".join(reasons[:shown]) + more


def encoding_of(dataset: Rows) -> Encoding | None:
    """Return what made the memories of a dataset; None where they are not vectors of one width.

    Args:
        dataset: that `encode_dataset` made, or any other with a column `memory`.
    """
    shape: tuple[int, ...] = getattr((dataset.features or {}).get("memory"), "shape", ())
    if len(shape) != 2:
        return None
    try:
        about = json.loads(dataset.info.description)
        encoders = {kind: EncoderInfo(**info) for kind, info in about["encoders"].items()}
        return Encoding(shape[1], encoders, about["saved_memories"])
    except (TypeError, KeyError, ValueError, AttributeError):  # of another origin
        return Encoding(shape[1], {}, True)


def _describe(encoder: RowEncoder, name: str | None) -> dict[str, object]:
    """Return the fields of `EncoderInfo`."""
    settings = {key: getattr(encoder, key, None) for key in ("pooled", "pooling", "grid")}
    return {"fingerprint": encoder.fingerprint, "name": name, **{k: v for k, v in settings.items() if v is not None}}


def _width(dataset: Rows, encoders: Mapping[str, RowEncoder], dim: int | None) -> int:
    """Return the width of the memories of a dataset."""
    widths = [encoder.dim for encoder in encoders.values()]
    if dim is None and "memory" in (dataset.column_names or ()):
        saved = (row_memory(row["memory"]) for row in dataset.select_columns("memory") if row["memory"])
        widths += [memory.dim for memory in [next(saved, None)] if memory is not None]
    if dim is None and not widths:
        raise ConfigError("rows have no memory, and there is no encoder: give dim=")
    if dim is not None and max(widths, default=0) > check_int("dim", dim):
        raise ConfigError(f"an encoder gives vectors {max(widths)} wide, and dim={dim}: give dim={max(widths)}")
    return max(widths) if dim is None else dim


def _removed(dataset: Rows, host: str) -> list[str]:
    """Return the columns that encoded memories take the place of."""
    contents = {"images", "example", "passage", "passages", *MEMORY, *(["image"] if host == "language" else [])}
    return [name for name in dataset.column_names or () if name in contents]


def _features(dataset: Rows, removed: Sequence[str], dim: int, dtype: str, strict: bool) -> Features:
    """Return the columns of the encoded dataset."""
    datasets = import_extra("datasets", "train")
    remaining = {name: kind for name, kind in dataset.features.items() if name not in removed}
    new = {
        "memory": datasets.Array2D((None, dim), dtype),
        "segments": datasets.List(datasets.Value("int32")),
        "scores": datasets.List(datasets.Value("float32")),
        "sources": datasets.List(datasets.Value("string")),
    }
    return datasets.Features({**remaining, **new, **({} if strict else {"error": datasets.Value("string")})})


def _file_states(dataset: Dataset) -> list[object]:
    """Return name, size and time of the files of rows, which may change while their names stay."""
    names = [name for name in ("image", "images", "example", "memory") if name in dataset.column_names]
    if encoding_of(dataset) is not None:
        names.remove("memory")
    paths = (path for name in names for files in files_of(dataset, name) for path in files)
    states = ((path, os.stat(path)) for path in paths if os.path.isfile(path))
    return [(path, state.st_size, state.st_mtime_ns) for path, state in states]


# Encoding of a batch, in the processes of `map` ---------------------------------------------------------------------


def _encode_batch(
    columns: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    rank: int | None = None,
    *,
    encoders: Mapping[str, Any],
    host: str,
    dim: int,
    dtype: str,
    strict: bool,
    batch_size: int,
    first: int,
) -> dict[str, list[Any]]:
    """Return the memories of rows, as the columns that `encode_dataset` adds."""
    if rank is not None and torch.cuda.device_count() > 1:
        for encoder in encoders.values():
            encoder.to(f"cuda:{rank % torch.cuda.device_count()}")
    rows: list[Row] = []
    errors: dict[int, MmattnError] = {}
    for index, values in zip(indices, zip(*columns.values(), strict=True), strict=True):
        try:
            rows.append(make_row(dict(zip(columns, values, strict=True)), host))
        except ConfigError as error:
            rows.append(Row(""))
            errors[index] = error
    images = _encoded_images(encoders.get("pictures"), rows, batch_size)
    passages = _encoded_passages(encoders.get("passages"), rows, batch_size)
    encoded: dict[str, list[Any]] = {name: [] for name in (*MEMORY, "sources", *(() if strict else ("error",)))}
    for index, row in zip(indices, rows, strict=True):
        place, refused = f"row {first + index}", errors.get(index) or _unreadable(row, images)
        if refused is not None and strict:
            raise type(refused)(f"{place}: {refused}") from refused
        if refused is not None:
            memory = _memory_columns(Row(""), [], dim, dtype, place)
        else:
            parts = [*(images[_key(image)] for image in row.images), *(passages[text] for text in row.passages)]
            memory = _memory_columns(row, parts, dim, dtype, place)
        sources = [*(image if isinstance(image, str) else "" for image in row.images), *row.passages]
        error_text = None if refused is None else f"{place}: {refused}"
        for name, value in {**memory, "sources": sources, "error": error_text}.items():
            if name in encoded:
                encoded[name].append(value)
    return encoded


def _key(image: object) -> object:
    """Return a key that is equal for pictures that need be encoded only once."""
    return image if isinstance(image, (str, bytes)) else id(image)


def _encoded_images(encoder: Any, rows: Sequence[Row], batch_size: int) -> dict[object, Any]:
    """Return the vectors (m, e) of each picture of rows, or the ImageError of one that cannot be read."""
    images = {_key(image): image for row in rows for image in row.images}
    encoded: dict[object, Any] = {}
    keys = list(images)
    for start in range(0, len(keys), batch_size):  # so that few pictures are in memory at once
        batch = keys[start : start + batch_size]
        try:
            memory = encoder([images[key] for key in batch], batch_size=batch_size)
        except ImageError:
            errors = {key: error for key in batch if (error := _read_error(images[key])) is not None}
            if not errors:
                raise
            encoded |= errors
            batch = [key for key in batch if key not in errors]
            if not batch:
                continue
            memory = encoder([images[key] for key in batch], batch_size=batch_size)
        encoded |= zip(batch, _real_slots(memory), strict=True)
    return encoded


def _encoded_passages(encoder: Any, rows: Sequence[Row], batch_size: int) -> dict[str, Tensor]:
    """Return the vectors (m, e) of each passage of rows."""
    passages = list(dict.fromkeys(passage for row in rows for passage in row.passages))
    if not passages:
        return {}
    return dict(zip(passages, _real_slots(encoder(passages, batch_size=batch_size)), strict=True))


def _real_slots(memory: Memory) -> list[Tensor]:
    """Return the vectors (m, e) of each row of a memory, without padding, on the CPU."""
    tokens, real = memory.tokens.detach().float().cpu(), memory.real_slots().cpu()
    return [row[slots] for row, slots in zip(tokens, real, strict=True)]


def _read_error(image: object) -> ImageError | None:
    try:
        load_image(image)
    except ImageError as error:
        return error
    return None


def _unreadable(row: Row, images: Mapping[object, Any]) -> ImageError | None:
    """Return the error of a picture in the memory of a row, or of one that is to be drawn."""
    error = next((images[_key(i)] for i in row.images if isinstance(images[_key(i)], ImageError)), None)
    if error is not None or row.picture is None or any(row.picture is image for image in row.images):
        return error
    return _read_error(row.picture)


def _memory_columns(row: Row, parts: Sequence[Any], dim: int, dtype: str, place: str) -> dict[str, Any]:
    """Return the memory of a row, of vectors (m, e) and a saved memory, as columns."""
    memories = [Memory(part[None], segments=torch.zeros(1, len(part), dtype=torch.long)) for part in parts]
    if (saved := row_memory(row.memory)) is not None:
        memories.append(saved.to(torch.float32))
    if not memories:
        return {"memory": torch.zeros(0, dim).numpy(), "segments": [], "scores": None}
    if (widest := max(memory.dim for memory in memories)) > dim:
        raise ConfigError(f"{place}: a memory is {widest} wide, and the dataset has {dim}: give dim={widest}")
    padded = [memory.replace(torch.nn.functional.pad(memory.tokens, (0, dim - memory.dim))) for memory in memories]
    memory = Memory.cat(padded)
    real = memory.real_slots()[0]
    tokens = memory.tokens[0, real].to(DTYPES[dtype])
    if not bool(tokens.isfinite().all()):
        highest = float(memory.tokens.abs().max())
        raise ConfigError(f"{place}: vectors of up to {highest:.3g} do not fit into {dtype}: give dtype='float32'")
    segments = torch.zeros_like(real, dtype=torch.long) if memory.segments is None else memory.segments[0]
    scores = None if memory.scores is None else memory.scores[0, real].tolist()
    return {"memory": tokens.numpy(), "segments": segments[real].tolist(), "scores": scores}
