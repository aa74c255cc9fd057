"""Describe pictures with a fine-tuned adapter: what `mmattn caption` does with a run of this recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import training
from mmattn.errors import AdapterFileError
from mmattn.recipes import read_settings

from .language import load_lm, write_texts
from .memories import load_pictures
from .settings import Config

USED = ("lm", "quantise", "encoder", "lora", "caption")


def caption(images: Sequence[Any], adapter: str | Path, *, progress: bool = False) -> list[str]:
    """A text for each picture, by the adapter in a run's folder, with the encoder and language model of that run.

    Raises:
        AdapterFileError: the folder holds no adapter, not of such a run, or one that does not read pictures with this
        encoder. ImageError: a picture that cannot be read.
    """
    folder = Path(adapter)
    found = folder.parent / "config.resolved.yaml"
    if not found.is_file():
        raise AdapterFileError(
            f"{found} is missing: it says which encoder and language model the adapter in {folder} belongs to; keep "
            "the adapter in the folder of its run"
        )
    # What it was trained with is another matter: older runs have other names for it.
    given = {name: value for name, value in read_settings(found).items() if name in USED}
    settings = Config.model_validate(given)
    lm, tokenizer = load_lm(settings.lm, settings.quantise, "cpu")
    if settings.lora.rank:
        lm = training.load_lora(lm, folder.parent / "lora")
    model = mmattn.load(lm, folder).eval()
    eye = load_pictures(settings.encoder)
    about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if about["encoder"] is not None and about["encoder"] != eye.fingerprint:
        raise AdapterFileError(
            f"the adapter in {folder} was trained on memories of another encoder than {settings.encoder}, or not on "
            "pictures alone"
        )
    memory = eye(list(images), progress=progress)
    options = settings.caption.model_dump()
    return write_texts(model, tokenizer, memory.to(torch.float32), **options)
