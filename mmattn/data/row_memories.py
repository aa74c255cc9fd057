"""Memories of rows, encoded once: the memory of a picture or passage is cached in a file named by encoder and content.

A frozen encoder returns the same memory in every epoch, so it runs in the first one only, or before it (`prepare`);
runs with other settings, and other processes, read the same files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from mmattn.data.row import (
    Row,
    RowEncoder,
    content_sha256,
    encode_parts,
    encoded_parts,
    encoders_fingerprint,
    given_memory,
    why_unreadable,
)
from mmattn.errors import ConfigError, ShapeError, check_float, check_int
from mmattn.memory import Memory
from mmattn.progress import batches

# Rows whose pictures are in memory at once while they are encoded.
_TOGETHER = 1024


class MemorySource(Protocol):
    """Memories of rows: `RowMemories`, or an `EncodedDataset`."""

    @property
    def dim(self) -> int:
        """Width e of the memories."""

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the encoders; None where there are none."""

    def of(self, rows: Sequence[Row]) -> Memory | None:
        """Return the memory (b, m, e) of b rows, empty in a row without one; None if no row has any."""


class RowMemories:
    """Memories of rows: pictures by one encoder, passages by another, saved memories as they are.

    Vectors narrower than the widest are padded with zeros, so that one adapter reads all of them.

    Args:
        folder: of the cache, a file for each picture and passage.
        pictures: encoder of pictures; None where no row has any.
        passages: encoder of passages; None where no row has any.
        dim: width e of the memory; None for that of the wider encoder.
        batch_size: pictures or passages encoded at once.

    Attributes:
        skipped: pictures that `prepare` could not read and passed over.

    Raises:
        ConfigError: neither an encoder nor a width, or an encoder wider than it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        pictures: RowEncoder | None = None,
        passages: RowEncoder | None = None,
        dim: int | None = None,
        batch_size: int = 32,
    ) -> None:
        widths = [encoder.dim for encoder in (pictures, passages) if encoder is not None]
        if dim is None and not widths:
            raise ConfigError("without an encoder the width of the memory must be given: dim=")
        self.dim: int = check_int("dim", max(widths) if dim is None else dim)
        if widths and max(widths) > self.dim:
            raise ConfigError(f"an encoder gives vectors {max(widths)} wide, and the memory is to have {self.dim}")
        self.folder, self.batch_size = Path(folder), check_int("batch_size", batch_size)
        self.encoders = {"pictures": pictures, "passages": passages}
        self.skipped = 0

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the encoders; None where there are none."""
        return encoders_fingerprint([one.fingerprint for one in self.encoders.values() if one is not None])

    def prepare(
        self,
        rows: Iterable[Row],
        *,
        process_index: int = 0,
        num_processes: int = 1,
        progress: bool = False,
        skip_broken: bool = False,
    ) -> int:
        """Encode what is not in the cache yet, of several processes each its share.

        Args:
            rows: of any number.
            process_index: of this process, from 0.
            num_processes: that share the work.
            progress: show a progress bar.
            skip_broken: pass over pictures that cannot be read, which `unreadable` then names.

        Returns:
            The number of pictures and passages that this process took on.

        Raises:
            ImageError: a picture that cannot be read.
            TextError: a passage that cannot be read.
            ConfigError: no encoder for it.
        """
        encoded, left = 0, iter(rows)
        while some := list(itertools.islice(left, _TOGETHER)):
            places = {self._place(kind, part): (kind, part) for row in some for kind, part in encoded_parts(row)}
            # Shared out by name: how far another process has come must not change who does what.
            own = sorted(places)[process_index::num_processes]
            missing = [place for place in own if not place.is_file()]
            for kind in self.encoders:
                parts = {place: places[place][1] for place in missing if places[place][0] == kind}
                self._encode(kind, parts, progress, skip_broken and kind == "pictures")
            encoded += len(missing)
        return encoded

    def unreadable(self, rows: Iterable[Row]) -> dict[int, str]:
        """The rows with pictures that `prepare` passed over, in any process, and why each cannot be read.

        Args:
            rows: the same as `prepare` was given.
        """
        reasons: dict[int, str] = {}
        for number, row in enumerate(rows):
            for kind, part in encoded_parts(row):
                if kind == "pictures" and not self._place(kind, part).is_file():
                    why = why_unreadable(part)
                    if why is not None:
                        reasons.setdefault(number, why)
        return reasons

    def of(self, rows: Sequence[Row]) -> Memory | None:
        """The memory (b, m, e) of b rows, empty in a row without one; None if no row has any."""
        if not any(row.has_memory for row in rows):
            return None
        self.prepare(rows)
        return Memory.stack([self._of(row) for row in rows])

    def _of(self, row: Row) -> Memory:
        parts = [Memory.load(self._place(kind, part)).to(torch.float32) for kind, part in encoded_parts(row)]
        if row.memory is not None:
            parts.append(given_memory(row.memory))
        return Memory.cat([self._widened(part) for part in parts]) if parts else Memory(torch.zeros(1, 0, self.dim))

    def _widened(self, memory: Memory) -> Memory:
        """Return a memory of the width of all, whose segments tell the parts of a row from each other."""
        if memory.dim > self.dim:
            raise ShapeError(
                f"a row's memory is {memory.dim} wide, and the adapter reads {self.dim}: give dim={memory.dim}"
            )
        tokens, segments = torch.nn.functional.pad(memory.tokens, (0, self.dim - memory.dim)), memory.segments
        segments = torch.zeros(tokens.shape[:2], dtype=torch.long) if segments is None else segments
        return Memory(tokens, memory.mask, segments, memory.scores, check_finite=memory.finite_checked)

    def _place(self, kind: str, part: object) -> Path:
        encoder = self.encoders[kind]
        if encoder is None:
            raise ConfigError(f"a row has {kind}, and there is no encoder for them: name one")
        if kind == "pictures" and isinstance(part, (str, os.PathLike)):
            about = os.stat(part)
            name = _file_sha256(os.fspath(part), about.st_size, about.st_mtime_ns)
        else:
            name = content_sha256(kind, part)
        return self.folder / encoder.fingerprint[:24] / name[:2] / f"{name[:40]}.safetensors"

    def _encode(self, kind: str, missing: dict[Path, object], progress: bool, skip_broken: bool) -> None:
        encoder = self.encoders[kind]
        if encoder is None:
            return
        places = list(missing)
        for start in batches(len(places), self.batch_size, f"encoding {kind}", progress and bool(places)):
            some = places[start : start + self.batch_size]
            encoded = encode_parts(encoder, [missing[place] for place in some], self.batch_size, skip_broken)
            for place, tokens in zip(some, encoded, strict=True):
                if tokens is None:
                    self.skipped += 1
                    continue
                half = tokens.half()
                # Half precision halves the file, where it can hold the values.
                smallest = half if bool(torch.isfinite(half).all()) else tokens
                place.parent.mkdir(parents=True, exist_ok=True)
                Memory(smallest[None], check_finite=False).save(place)


@lru_cache(1 << 20)
def _file_sha256(path: str, size: int, modified: int) -> str:
    """Return the sha256 of a picture's file, which is read again once it changes."""
    return content_sha256("pictures", path)


def augment_memory(memory: Memory, *, keep_fraction: float = 1.0, noise_std: float = 0.0, seed: int = 0) -> Memory:
    """Return a memory with random slots of each row masked, and with noise on all.

    Args:
        memory: (b, m, e).
        keep_fraction: share of the slots that stay, at least one; different ones in each row.
        noise_std: standard deviation of the noise, in units of the standard deviation of each of the e features.
        seed: of the slots and the noise.

    Raises:
        ConfigError: a fraction outside (0, 1], or a negative standard deviation.
    """
    if not 0 < check_float("keep_fraction", keep_fraction) <= 1:
        raise ConfigError(f"keep_fraction must be above 0 and at most 1, got {keep_fraction}")
    check_float("noise_std", noise_std, at_least=0)
    generator = torch.Generator(memory.device).manual_seed(seed)
    if noise_std:
        tokens = memory.tokens
        # Padding, whatever lies in it, has no part in how large the noise is.
        real = tokens.flatten(0, 1) if memory.mask is None else tokens[memory.mask]
        spread = real.std(0) if len(real) > 1 else torch.zeros_like(tokens[0, 0])
        noise = torch.randn(tokens.shape, generator=generator, device=tokens.device)
        memory = memory.replace(tokens + noise_std * spread * noise)
    if keep_fraction == 1:
        return memory
    real = memory.real_slots()
    order = torch.rand(real.shape, generator=generator, device=memory.device).masked_fill(~real, 2).argsort(1)
    counts = (keep_fraction * real.sum(1, keepdim=True)).round().clamp(min=1)
    chosen = torch.arange(memory.length, device=memory.device) < counts
    mask = real & torch.zeros_like(real).scatter(1, order, chosen)
    return Memory(
        memory.tokens, mask, memory.segments, memory.scores, memory.sources, check_finite=memory.finite_checked
    )
