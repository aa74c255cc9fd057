"""Contents of a row's memory: pictures, passages and saved memories, their checksums, and their vectors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mmattn.data.rows import Row, row_memory
from mmattn.encoders import load_image
from mmattn.errors import ConfigError, ImageError
from mmattn.memory import Memory
from mmattn.storage.fingerprints import file_fingerprint


class RowEncoder(Protocol):
    """An encoder of pictures or passages, each of which becomes a row of a memory."""

    @property
    def dim(self) -> int:
        """Width e of the vectors."""

    @property
    def fingerprint(self) -> str:
        """A fingerprint of weights and settings."""

    def __call__(self, contents: Any, /, *, batch_size: int) -> Memory:
        """Return the memory (n, m, e) of n pictures or passages."""


def encoded_parts(row: Row) -> list[tuple[str, Any]]:
    """The parts of a row's memory that an encoder reads, in order, each with its kind: "pictures" or "passages"."""
    return [("pictures", image) for image in row.images] + [("passages", text) for text in row.passages]


def parts_of(row: Row) -> list[tuple[str, Any]]:
    """Return the parts of a row's memory in order, each with its kind, a saved memory included."""
    return encoded_parts(row) + ([] if row.memory is None else [("memories", row.memory)])


def content_key(kind: str, part: Any) -> bytes:
    """Return a sha256 of the kind and content of a part."""
    return hashlib.sha256(f"{kind} {content_sha256(kind, part)}".encode()).digest()


def memory_kinds(rows: Iterable[Row]) -> set[str]:
    """Return the kinds of contents of rows: "pictures", "passages", and "memories" that they come with.

    Args:
        rows: what `read_rows` returned, or any sequence of rows; only the latter are gone through.
    """
    declared: set[str] | None = getattr(rows, "memory_kinds", None)
    if declared is not None:
        return declared
    kinds = {kind for row in rows for kind, _ in encoded_parts(row)}
    return kinds | {"memories" for row in rows if row.memory is not None}


def content_sha256(kind: str, part: Any) -> str:
    """The sha256 of the content of a part, equal for equal files, bytes, texts, arrays or memories."""
    if kind == "passages":
        return hashlib.sha256(part.encode()).hexdigest()
    if isinstance(part, (str, os.PathLike)):
        return file_fingerprint(part)
    if isinstance(part, (bytes, bytearray)):
        return hashlib.sha256(part).hexdigest()
    if isinstance(part, Memory):
        digest = hashlib.sha256()
        for name in ("tokens", "mask", "segments", "scores"):
            value = getattr(part, name)
            if value is not None:
                value = value.detach().cpu().contiguous()
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()
    if isinstance(part, Tensor):
        part = part.detach().cpu().numpy()
    if not hasattr(part, "tobytes"):
        raise ConfigError(f"a picture must be a path, bytes, a PIL image or an array, got {type(part).__name__}")
    palette = part.getpalette() if getattr(part, "mode", "") == "P" else None
    about_it = (getattr(part, "mode", None), getattr(part, "size", None), getattr(part, "shape", None), palette)
    return hashlib.sha256(repr(about_it).encode() + part.tobytes()).hexdigest()


def encode_parts(
    encoder: RowEncoder, parts: Sequence[Any], batch_size: int, skip_broken: bool = False
) -> list[Tensor | None]:
    """The vectors (m, e) of each part, without padding, on the CPU."""
    try:
        memory = encoder(list(parts), batch_size=batch_size)
        readable = [True] * len(parts)
    except ImageError:
        readable = [why_unreadable(part) is None for part in parts]
        if not skip_broken or all(readable):
            raise
        if not any(readable):
            return [None] * len(parts)
        memory = encoder([part for part, one in zip(parts, readable, strict=True) if one], batch_size=batch_size)
    tokens, mask = memory.tokens.detach().cpu(), None if memory.mask is None else memory.mask.cpu()
    rows = iter(range(memory.batch))
    vectors: list[Tensor | None] = []
    for one in readable:
        row = next(rows) if one else None
        vectors.append(None if row is None else tokens[row] if mask is None else tokens[row][mask[row]])
    return vectors


def why_unreadable(image: object) -> str | None:
    """Why a picture cannot be read; None where it can."""
    try:
        load_image(image)
    except ImageError as error:
        return str(error)
    return None


def given_memory(memory: object) -> Memory:
    """The memory (1, m, e) that a row comes with, in float32."""
    one = row_memory(memory)
    assert one is not None
    scores = None if one.scores is None else one.scores.float()
    return Memory(one.tokens.float(), one.mask, one.segments, scores, check_finite=one.finite_checked)


def encoders_fingerprint(fingerprints: Sequence[str]) -> str | None:
    """Return a fingerprint of one or two encoders together; None where there are none."""
    if len(fingerprints) < 2:
        return fingerprints[0] if fingerprints else None
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()
