"""What the rows are seen with: the encoders that the data needs, and where their memories are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmattn
from mmattn import training
from mmattn.errors import ConfigError
from mmattn.pipelines import load_image_encoder
from mmattn.recipes import resolve_asset

from .settings import Config


def load_texts(settings: Config, device: Any = "cpu") -> Any:
    """The encoder of passages: the text tower of a CLIP of open_clip, or any encoder of Hugging Face."""
    name = resolve_asset(settings.text_encoder)
    if (Path(name) / "open_clip_config.json").is_file():
        return mmattn.OpenCLIPTextEncoder(f"local-dir:{name}", device=device)
    return mmattn.TextEncoder(name, pooling=settings.pooling, device=device)


def row_memories(settings: Config, rows: Any, device: Any) -> training.RowMemories:
    """The memories of rows, by the encoders they need.

    Raises:
        ConfigError: no row has anything to be remembered.
    """
    images, passages, saved = needs(rows)
    if not (images or passages or saved):
        raise ConfigError(
            f"no row of {settings.data.path} has a picture, a passage or a memory: there would be nothing to look at"
        )
    eye = load_image_encoder(resolve_asset(settings.encoder), device) if images else None
    reader = load_texts(settings, device) if passages else None
    widths = [encoder.dim for encoder in (eye, reader) if encoder is not None]
    if saved:
        found = next(row.memory for row in rows if row.memory is not None)
        widths.append((found if isinstance(found, mmattn.Memory) else mmattn.Memory.load(found)).dim)
    return training.RowMemories(settings.data.cache, pictures=eye, passages=reader, dim=max(widths))


def needs(rows: Any) -> tuple[bool, bool, bool]:
    """Whether rows have pictures, passages and saved memories; of a dataset its columns say so."""
    if isinstance(rows, (training.DatasetRows, training.StreamRows)):
        named = set(rows.columns)
        pictures = {"image", "images", "example"} & named
        return bool(pictures), bool({"passage", "passages"} & named), "memory" in named
    return (
        any(row.images for row in rows),
        any(row.passages for row in rows),
        any(row.memory is not None for row in rows),
    )


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
