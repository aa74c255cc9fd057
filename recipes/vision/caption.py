"""Describe pictures with a trained adapter: what `mmattn caption` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import write_captions
from seeing import load_encoder, load_lm
from settings import Config

import mmattn
from mmattn.errors import AdapterFileError
from mmattn.recipes import read_settings


def caption(images: Sequence[Any], adapter: str | Path, *, progress: bool = False) -> list[str]:
    """A caption for each picture, by the adapter in a run's folder, with the encoder and language model of that run.

    Raises:
        AdapterFileError: the folder holds no adapter, not of such a run, or the encoder is not the one it was trained
        with. ImageError: a picture that cannot be read.
    """
    settings, model, tokenizer, eye = open_run(adapter)
    memory = eye(list(images), progress=progress)
    return write_captions(model, tokenizer, memory.to(torch.float32), **settings.caption.model_dump())


def open_run(adapter: str | Path) -> tuple[Config, Any, Any, Any]:
    """The settings, model, tokenizer and encoder that belong to an adapter's folder."""
    folder = Path(adapter)
    found = folder.parent / "config.resolved.yaml"
    if not found.is_file():
        raise AdapterFileError(
            f"{found} is missing: it says which encoder and language model the adapter in {folder} belongs to; keep "
            "the adapter in the folder of its run"
        )
    settings = Config.model_validate(read_settings(found))
    lm, tokenizer = load_lm(settings.lm, settings.device)
    model = mmattn.load(lm, folder)
    eye = load_encoder(settings.encoder, settings.device)
    trained_on = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["encoder"]
    if trained_on is not None and trained_on != eye.fingerprint:
        raise AdapterFileError(
            f"the adapter in {folder} was trained on memories of another encoder than {settings.encoder}: its weights "
            "or settings have changed since"
        )
    return settings, model.eval(), tokenizer, eye


if __name__ == "__main__":
    import sys

    for image, text in zip(sys.argv[2:], caption(sys.argv[2:], sys.argv[1]), strict=True):
        print(f"{image}: {text}")
