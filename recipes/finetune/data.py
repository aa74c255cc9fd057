"""The rows of a run: read from any source, their memories encoded, and a part of them held out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from mmattn import models, training
from mmattn.encoders import load_image_encoder, load_text_encoder
from mmattn.errors import ConfigError

from .settings import Config

HELD_OUT = 0.1  # the share that is held out of data without rows of its own for that
MOST_HELD_OUT = 1000  # rows that are held out by default, at most: there may be millions


@dataclass(frozen=True)
class Data:
    """Datasets to train on and to evaluate on, what made their memories, and the reasons why rows were left out.

    `held_out` is None until a part of `rows` is held out, `encoding` until their memories are encoded.
    """

    rows: Any
    held_out: Any = None
    encoding: training.Encoding | None = None
    left_out: tuple[str, ...] = ()

    @property
    def streamed(self) -> bool:
        """Return True if the rows arrive one by one."""
        return isinstance(self.rows, IterableDataset)

    @property
    def parts(self) -> list[Any]:
        """Return the datasets that can be read before the training: a stream cannot."""
        return [part for part in (self.rows, self.held_out) if not (part is None or isinstance(part, IterableDataset))]


def read(settings: Config, say: Callable[[str], None] = print) -> Data:
    """Read the rows of the settings, and print a summary of them."""
    data, path = settings.data, models.resolve(settings.data.path)
    options: dict[str, Any] = {"columns": data.columns, "template": data.template, "streaming": data.streaming}
    rows: Any = training.read_rows(path, settings.host, split=data.split, **options)
    held_out = None
    if isinstance(rows, dict):
        splits, rows = rows, rows.get("train")
        if rows is None:
            raise ConfigError(f"{path} has no rows to train on, only {', '.join(splits)}: name them by data.split")
        name = next((name for name in ("validation", "test") if name in splits), None)
        if name is not None and data.held_out is None:
            held_out = splits[name]
            say(f"held out, {name}: {held_out}")
    say(f"{path}: {rows}")
    if isinstance(held_out, IterableDataset):
        held_out = training.read_rows(path, settings.host, split=name, **options | {"streaming": False})
    return Data(rows, held_out)


def encode(data: Data, settings: Config, device: torch.device | str, process_first: Callable[[], Any]) -> Data:
    """Return the data with the memories of all rows as vectors, and with a part held out.

    Rows whose pictures cannot be read are left out and named, but with `data.strict`.
    """
    encoding, left_out, parts = training.encoding_of(data.rows), list[str](), list[Any]()
    if encoding is not None:
        check_encoders(settings, encoding)
        if settings.host == "unet" and "image" not in data.rows.column_names:
            raise ConfigError(f"{settings.data.path} has no pictures to draw: encode it for a UNet, or name pictures")
        return split(data, encoding, settings)
    encoders = load_encoders(settings, training.memory_kinds(data.rows, settings.host), device)
    strict = settings.data.strict or data.streamed
    for part in (data.rows, data.held_out):
        if part is not None:
            with process_first():
                part = training.encode_dataset(part, settings.data.cache, host=settings.host, strict=strict, **encoders)
            encoding = training.encoding_of(part)
            if not strict:
                part, reasons = training.drop_errors(part)
                left_out += reasons
        parts.append(part)
    return split(Data(*parts, encoding, tuple(left_out)), encoding, settings)


def split(data: Data, encoding: training.Encoding | None, settings: Config) -> Data:
    """Return the data with a part of the rows held out, if there are none for that, as tensors."""
    rows, held_out = data.rows, data.held_out
    if held_out is None:
        share: float = HELD_OUT if settings.data.held_out is None else settings.data.held_out
        if settings.data.held_out is None and not data.streamed and HELD_OUT * len(rows) > MOST_HELD_OUT:
            share = MOST_HELD_OUT
        rows, held_out = training.split_rows(rows, share, settings.seed)
        if data.streamed:
            held_out = Dataset.from_list(list(held_out), features=held_out.features)
    return Data(rows.with_format("torch"), held_out.with_format("torch"), encoding, data.left_out)


def load_encoders(settings: Config, kinds: set[str], device: torch.device | str) -> dict[str, Any]:
    """Return the encoders that rows with these contents need."""
    if not kinds:
        raise ConfigError(f"no row of {settings.data.path} has a picture, a passage or a memory to attend to")
    encoders: dict[str, Any] = {}
    if "pictures" in kinds:
        encoders["pictures"] = load_image_encoder(settings.encoder, device)
    if "passages" in kinds:
        encoders["passages"] = load_text_encoder(settings.text_encoder, settings.pooling, device)
    names = {"pictures": settings.encoder, "passages": settings.text_encoder}
    return {**encoders, "names": {kind: names[kind] for kind in encoders}}


def check_encoders(settings: Config, encoding: training.Encoding) -> None:
    """Refuse a dataset of other encoders than those of the settings, with which the adapter will be used."""
    pictures, passages = encoding.encoders.get("pictures"), encoding.encoders.get("passages")
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


def captions_in_memory(dataset: Any) -> Any:
    """Move texts into the memory; a picture is then no example for itself, as its text says what is drawn."""

    def move(row: dict[str, Any]) -> dict[str, Any]:
        passages = [*(row.get("passages") or ()), *filter(None, [row.get("passage")]), *filter(None, [row["text"]])]
        return {"text": "", "passages": passages}

    removed = [name for name in ("passage",) if name in dataset.column_names]
    return dataset.map(move, remove_columns=removed)


def has_memory(row: Mapping[str, Any]) -> bool:
    """Return True if a row of an encoded dataset has a memory."""
    return len(row["memory"]) > 0


def sample_rows(held_out: Any) -> list[dict[str, Any]]:
    """Return the held-out rows for which texts or pictures are generated after the training."""
    return [row for row in held_out if has_memory(row)][:8]


def picture_files(row: Mapping[str, Any]) -> list[str]:
    """Return the files of the pictures in the memory of a row that are still there."""
    return [source for source in row.get("sources") or () if os.path.isfile(source)]


def slot_names(row: Mapping[str, Any], segments: Sequence[int]) -> list[str]:
    """Return the picture or passage of each slot, by its segment; those of a saved memory come last."""
    names, pictures = [], 0
    for source in row.get("sources") or ():
        is_picture = not source or os.path.isfile(source)
        pictures += is_picture
        names.append(f"picture {pictures}" if is_picture else source)
    return [names[k] if k < len(names) else f"memory {k - len(names) + 1}" for k in segments]
