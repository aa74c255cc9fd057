"""The rows of a run: read from wherever they are, without those that cannot be used, and split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import mmattn
from mmattn import training
from mmattn.errors import ConfigError, ImageError
from mmattn.recipes import resolve_asset

from .settings import Config

HELD_OUT = 0.1
"""The share that is held out of data without rows of its own for that."""
MOST_HELD_OUT = 1000
"""Encoded rows that are held out by default, at most: there may be millions."""


@dataclass(frozen=True)
class Data:
    """Rows to train on, rows that are never trained on, and what was left out of both, with the reasons."""

    rows: Any
    held_out: Any
    left_out: tuple[str, ...] = ()

    @property
    def streamed(self) -> bool:
        return isinstance(self.rows, training.StreamRows)

    @property
    def encoded(self) -> training.EncodedDataset | None:
        """The encoded dataset that the rows and their memories come from."""
        return self.rows if isinstance(self.rows, training.EncodedDataset) else None

    @property
    def parts(self) -> list[Any]:
        """What can be gone through before the training: a stream cannot."""
        return [part for part in (self.rows, self.held_out) if not isinstance(part, training.StreamRows)]


def read(settings: Config, say: Callable[[str], None] = print) -> Data:
    """The rows of the settings, and what was found, said in a line.

    Raises:
        ConfigError: no such data, or rows that cannot be used.
    """
    asked, path = settings.data, resolve_asset(settings.data.path)
    options: dict[str, Any] = {
        "columns": asked.columns,
        "template": asked.template,
        "streaming": asked.streaming,
        "skip_broken": not asked.strict,
    }
    rows = training.read_rows(path, settings.host, split=asked.split, **options)
    say(f"{path}: {rows.summary}")
    encoded = isinstance(rows, training.EncodedDataset)
    if encoded and settings.host == "unet":
        raise ConfigError(f"{path} has encoded memories, and a UNet needs the pictures that it is to draw: name them")
    own = training.held_out_split(path) if asked.held_out is None else None
    if own is None or own == asked.split:
        share: float = HELD_OUT if asked.held_out is None else asked.held_out
        if asked.held_out is None and encoded and HELD_OUT * len(rows) > MOST_HELD_OUT:
            share = MOST_HELD_OUT
        kept, held_out = training.split_rows(rows, share, settings.seed)
        return Data(kept, held_out, tuple(rows.left_out))
    held_out = training.read_rows(path, settings.host, split=own, **options | {"streaming": False})
    say(f"held out, {own}: {held_out.summary}")
    return Data(rows, held_out, (*rows.left_out, *held_out.left_out))


def encode(data: Data, memories: training.MemorySource, settings: Config, accelerator: Any, progress: bool) -> Data:
    """Encode all memories before anything is trained, and leave rows out whose pictures cannot be read.

    Raises:
        ImageError: one of them with data.strict. ConfigError: nothing else is left.
    """
    if not isinstance(memories, training.RowMemories):
        return data
    shared = {"process_index": accelerator.process_index, "num_processes": accelerator.num_processes}
    skip = {"skip_broken": not settings.data.strict, "progress": progress}
    for part in data.parts:
        memories.prepare(part, **shared, **skip)
    accelerator.wait_for_everyone()
    skipped = float(accelerator.reduce(torch.tensor(float(memories.skipped), device=accelerator.device), "sum"))
    if not skipped and settings.host == "language":
        return data
    left_out = list(data.left_out)

    def usable(part: Any) -> Any:
        if isinstance(part, training.StreamRows):
            return part
        broken = memories.unreadable(part) if skipped else {}
        if settings.host == "unet":
            broken = {**broken_pictures(part, settings.data.strict), **broken}
        # The message has the name of a file; other pictures have none.
        left_out.extend(
            why if isinstance(part[number].images[0], str) else f"the picture of {part[number].text!r:.60}: {why}"
            for number, why in sorted(broken.items())
        )
        kept = [number for number in range(len(part)) if number not in broken]
        if not kept and len(part):
            raise ConfigError(f"no picture of {settings.data.path} can be read:\n  " + "\n  ".join(left_out[:10]))
        if not broken:
            return part
        return part.select(kept) if isinstance(part, training.DatasetRows) else [part[number] for number in kept]

    return replace(data, rows=usable(data.rows), held_out=usable(data.held_out), left_out=tuple(left_out))


def broken_pictures(rows: Sequence[training.Row], strict: bool) -> dict[int, str]:
    """Rows whose picture to be drawn cannot be read, where it is not a part of their memory, too."""
    found = {}
    for number, row in enumerate(rows):
        if row.picture is not None and all(row.picture is not image for image in row.images):
            try:
                mmattn.load_image(row.picture)
            except ImageError as error:
                if strict:
                    raise
                found[number] = str(error)
    return found


def describe_left_out(left_out: Sequence[str], shown: int = 10) -> str:
    """The lines that name what was left out."""
    more = [f"and {len(left_out) - shown} more: see left_out.txt"] if len(left_out) > shown else []
    lines = [f"{len(left_out)} left out, because it cannot be used (data.strict=true stops instead):"]
    return "\n  ".join([*lines, *left_out[:shown], *more])


def sample_rows(held_out: Sequence[training.Row]) -> list[training.Row]:
    """Return the held-out rows for which texts or pictures are generated after the training."""
    return [row for row in held_out if row.has_memory][:8]
