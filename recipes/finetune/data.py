"""The rows of a run: read from any source, split, and their memories by the encoders that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import mmattn
from mmattn import models, training
from mmattn.encoders import load_image_encoder, load_text_encoder
from mmattn.errors import ConfigError, ImageError

from .settings import Config

HELD_OUT = 0.1  # the share that is held out of data without rows of its own for that
MOST_HELD_OUT = 1000  # encoded rows that are held out by default, at most: there may be millions


@dataclass(frozen=True)
class Data:
    """Rows to train on, rows that are never trained on, and the reasons why others were left out."""

    rows: Any
    held_out: Any
    left_out: tuple[str, ...] = ()

    @property
    def streamed(self) -> bool:
        """Return True if the rows arrive one by one."""
        return isinstance(self.rows, training.StreamRows)

    @property
    def encoded(self) -> training.EncodedDataset | None:
        """Return the encoded dataset that the rows and their memories come from."""
        return self.rows if isinstance(self.rows, training.EncodedDataset) else None

    @property
    def parts(self) -> list[Any]:
        """Return the rows that can be read before the training: a stream cannot."""
        return [self.held_out] if self.streamed else [self.rows, self.held_out]


def read(settings: Config, say: Callable[[str], None] = print) -> Data:
    """Read the rows of the settings, and print a summary of them."""
    data, path = settings.data, models.resolve(settings.data.path)
    options: dict[str, Any] = {
        "columns": data.columns,
        "template": data.template,
        "streaming": data.streaming,
        "skip_broken": not data.strict,
    }
    rows = training.read_rows(path, settings.host, split=data.split, **options)
    say(f"{path}: {rows.summary}")
    encoded = isinstance(rows, training.EncodedDataset)
    if encoded and settings.host == "unet":
        raise ConfigError(f"{path} has encoded memories, and a UNet needs the pictures that it is to draw: name them")
    split = training.held_out_split(path) if data.held_out is None else None
    if split is None or split == data.split:
        share: float = HELD_OUT if data.held_out is None else data.held_out
        if data.held_out is None and encoded and HELD_OUT * len(rows) > MOST_HELD_OUT:
            share = MOST_HELD_OUT
        train, held_out = training.split_rows(rows, share, settings.seed)
        return Data(train, held_out, tuple(rows.left_out))
    held_out = training.read_rows(path, settings.host, split=split, **options | {"streaming": False})
    say(f"held out, {split}: {held_out.summary}")
    return Data(rows, held_out, (*rows.left_out, *held_out.left_out))


def row_memories(settings: Config, rows: Any, device: torch.device | str) -> training.MemorySource:
    """Return the source of memories: the encoders that rows need, or the encoded rows themselves."""
    kinds = training.memory_kinds(rows)
    if not kinds:
        raise ConfigError(f"no row of {settings.data.path} has a picture, a passage or a memory to attend to")
    if isinstance(rows, training.EncodedDataset):
        check_encoders(settings, rows)
        return rows
    pictures = passages = None
    if "pictures" in kinds:
        pictures = load_image_encoder(settings.encoder, device)
    if "passages" in kinds:
        passages = load_text_encoder(settings.text_encoder, settings.pooling, device)
    widths = [encoder.dim for encoder in (pictures, passages) if encoder is not None]
    if "memories" in kinds:
        memory = next(row.memory for row in rows if row.memory is not None)
        widths.append((memory if isinstance(memory, mmattn.Memory) else mmattn.Memory.load(memory)).dim)
    return training.RowMemories(settings.data.cache, pictures=pictures, passages=passages, dim=max(widths))


def check_encoders(settings: Config, dataset: training.EncodedDataset) -> None:
    """Refuse a dataset of other encoders than those of the settings, with which the adapter will be used."""
    pictures, passages = dataset.encoders.get("pictures"), dataset.encoders.get("passages")
    if pictures is not None and pictures.name != settings.encoder:
        encoder: Any = load_image_encoder(settings.encoder, pooled=pictures.pooled)
        if encoder.fingerprint != pictures.fingerprint:
            raise ConfigError(
                f"the pictures of {settings.data.path} were encoded by {pictures.name}, and encoder={settings.encoder} "
                f"is another: set encoder={pictures.name}, or encode them anew"
            )
    reader = (settings.text_encoder, settings.pooling)
    if passages is not None and (passages.name, passages.pooling or "none") != reader:
        encoder = load_text_encoder(settings.text_encoder, settings.pooling)
        if encoder.fingerprint != passages.fingerprint:
            raise ConfigError(
                f"the passages were encoded by {passages.name} (pooling {passages.pooling}), and text_encoder="
                f"{settings.text_encoder} pooling={settings.pooling} is another: set those, or encode them anew"
            )


def encode(data: Data, memories: training.MemorySource, settings: Config, accelerator: Any, progress: bool) -> Data:
    """Encode all memories before anything is trained, and leave out rows whose pictures cannot be read."""
    if not isinstance(memories, training.RowMemories):
        return data
    for part in data.parts:
        memories.prepare(
            part,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            skip_broken=not settings.data.strict,
            progress=progress,
        )
    accelerator.wait_for_everyone()
    skipped = float(accelerator.reduce(torch.tensor(float(memories.skipped), device=accelerator.device), "sum"))
    left_out = list(data.left_out)

    def usable(part: Any) -> Any:
        broken = {} if not skipped or isinstance(part, training.StreamRows) else memories.unreadable(part)
        if settings.host == "unet" and not isinstance(part, training.StreamRows):
            broken = {**broken_pictures(part, settings.data.strict), **broken}
        if not broken:
            return part
        # The message has the name of a file; other pictures have none.
        left_out.extend(
            why if isinstance(part[number].images[0], str) else f"the picture of {part[number].text!r:.60}: {why}"
            for number, why in sorted(broken.items())
        )
        rest = [number for number in range(len(part)) if number not in broken]
        if not rest:
            raise ConfigError(f"no picture of {settings.data.path} can be read:\n  " + "\n  ".join(left_out[:10]))
        return part.select(rest) if isinstance(part, training.DatasetRows) else [part[number] for number in rest]

    return replace(data, rows=usable(data.rows), held_out=usable(data.held_out), left_out=tuple(left_out))


def broken_pictures(rows: Sequence[training.Row], strict: bool) -> dict[int, str]:
    """Return the rows whose picture to be drawn cannot be read; one that is in the memory, too, is checked there."""
    broken = {}
    for number, row in enumerate(rows):
        if row.picture is not None and all(row.picture is not image for image in row.images):
            try:
                mmattn.load_image(row.picture)
            except ImageError as error:
                if strict:
                    raise
                broken[number] = str(error)
    return broken


def captions_in_memory(rows: Sequence[training.Row]) -> list[training.Row]:
    """Move texts into the memory; a picture is then no example for itself, as its text says what is drawn."""
    moved = []
    for row in rows:
        images = tuple(image for image in row.images if image is not row.picture) if row.text else row.images
        passages = (*row.passages, row.text) if row.text else row.passages
        moved.append(training.Row("", "", images, passages, row.memory, row.picture))
    return moved


def sample_rows(held_out: Sequence[training.Row]) -> list[training.Row]:
    """Return the held-out rows for which texts or pictures are generated after the training."""
    return [row for row in held_out if row.has_memory][:8]


def picture_files(row: training.Row) -> list[str]:
    """Return the files of the pictures in the memory of a row; encoded rows have their names only."""
    return [one for one in row.images or getattr(row, "files", ()) if isinstance(one, str)]


def picture_grid(memories: training.MemorySource) -> tuple[int, int] | None:
    """Return rows and columns of the slots of a picture; None if they have no grid."""
    if isinstance(memories, training.EncodedDataset):
        pictures = memories.encoders.get("pictures")
        return None if pictures is None else pictures.grid
    return getattr(memories.encoders["pictures"], "grid", None) if isinstance(memories, training.RowMemories) else None
