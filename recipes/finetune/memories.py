"""What the rows are seen with: the encoders that the data needs, and where their memories are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mmattn
from mmattn import training
from mmattn.encoders import load_image_encoder, load_text_encoder
from mmattn.errors import ConfigError
from mmattn.recipes import resolve_asset

from .settings import Config


def row_memories(settings: Config, rows: Any, device: Any) -> training.MemorySource:
    """The memories of rows, by the encoders they need; encoded rows bring theirs.

    Raises:
        ConfigError: no row has anything to be remembered, or a dataset of other encoders than those of the settings.
    """
    kinds = training.memory_kinds(rows)
    if not kinds:
        raise ConfigError(
            f"no row of {settings.data.path} has a picture, a passage or a memory: there would be nothing to look at"
        )
    if isinstance(rows, training.EncodedDataset):
        check_encoders(settings, rows)
        return rows
    eye = load_image_encoder(resolve_asset(settings.encoder), device) if "pictures" in kinds else None
    reader = None
    if "passages" in kinds:
        reader = load_text_encoder(resolve_asset(settings.text_encoder), settings.pooling, device)
    widths = [encoder.dim for encoder in (eye, reader) if encoder is not None]
    if "memories" in kinds:
        found = next(row.memory for row in rows if row.memory is not None)
        widths.append((found if isinstance(found, mmattn.Memory) else mmattn.Memory.load(found)).dim)
    return training.RowMemories(settings.data.cache, pictures=eye, passages=reader, dim=max(widths))


def check_encoders(settings: Config, store: training.EncodedDataset) -> None:
    """Refuse a dataset of other encoders than those that the settings name, with which the adapter will be used.

    One of the same name is not loaded.

    Raises:
        ConfigError: an encoder of another fingerprint.
    """
    seen, read = store.encoders.get("pictures"), store.encoders.get("passages")
    if seen is not None and seen.name != settings.encoder:
        loaded: Any = load_image_encoder(resolve_asset(settings.encoder), pooled=seen.pooled)
        if loaded.fingerprint != seen.fingerprint:
            raise ConfigError(
                f"the pictures of {settings.data.path} were encoded by {seen.name}, and encoder={settings.encoder} is "
                f"another: set encoder={seen.name}, or encode them anew"
            )
    if read is not None and (read.name, read.pooling or "none") != (settings.text_encoder, settings.pooling):
        loaded = load_text_encoder(resolve_asset(settings.text_encoder), settings.pooling)
        if loaded.fingerprint != read.fingerprint:
            raise ConfigError(
                f"the passages of {settings.data.path} were encoded by {read.name} (pooling {read.pooling}), and "
                f"text_encoder={settings.text_encoder} pooling={settings.pooling} is another: set those, or encode "
                "them anew"
            )


def shown_pictures(row: training.Row) -> list[str]:
    """The files of the pictures that a row is shown, also of an encoded row, which has them no more."""
    return [one for one in row.images or getattr(row, "files", ()) if isinstance(one, str)]


def picture_grid(memories: training.MemorySource) -> tuple[int, int] | None:
    """Rows and columns of the slots of a picture; None where they have none, or nothing encodes pictures."""
    if isinstance(memories, training.EncodedDataset):
        seen = memories.encoders.get("pictures")
        return None if seen is None else seen.grid
    return getattr(memories.encoders["pictures"], "grid", None) if isinstance(memories, training.RowMemories) else None


def captions_in_memory(rows: Sequence[training.Row]) -> list[training.Row]:
    """The rows with their texts in the memory instead of before the UNet's own text encoder.

    A picture is then no example for itself: its text is to say what is drawn.
    """
    made = []
    for row in rows:
        images = tuple(image for image in row.images if image is not row.picture) if row.text else row.images
        passages = (*row.passages, row.text) if row.text else row.passages
        made.append(training.Row("", "", images, passages, row.memory, row.picture))
    return made


def without(rows: Sequence[training.Row]) -> list[training.Row]:
    """The rows without their memories."""
    return [training.Row(row.text, row.prompt, picture=row.picture) for row in rows]
