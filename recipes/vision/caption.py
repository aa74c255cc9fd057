"""Describe pictures with a trained adapter: what `mmattn caption` does."""

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

from .measure import write_captions
from .seeing import load_encoder, load_lm
from .settings import Config


def caption(images: Sequence[Any], adapter: str | Path, *, progress: bool = False) -> list[str]:
    """A caption for each picture, by the adapter in a run's folder, with the encoder and language model of that run.

    Raises:
        AdapterFileError: the folder holds no adapter, not of such a run, or the encoder is not the one it was trained
        with. ImageError: a picture that cannot be read.
    """
    settings, model, tokenizer, eye = open_run(adapter)
    memory = eye(list(images), progress=progress)
    return write_captions(model, tokenizer, memory.to(torch.float32), **settings.caption.model_dump())


class Captioner:
    """A run's adapter with the encoder and the language model of that run, loaded once for many pictures.

    Raises:
        AdapterFileError: as `caption`.
    """

    def __init__(self, adapter: str | Path) -> None:
        self.settings, self.model, self.tokenizer, self.eye = open_run(adapter)

    @torch.no_grad()
    def __call__(self, image: Any) -> mmattn.inspect.Trace:
        """The caption of a picture, as the title, and which patches each of its words attended to.

        Beside it stands the picture as the encoder saw it, on which the patches lie.

        Raises:
            ImageError: it cannot be read.
        """
        memory = self.eye([image]).to(torch.float32)
        (text,) = write_captions(self.model, self.tokenizer, memory, **self.settings.caption.model_dump())
        (ids,) = training.encode_texts(self.tokenizer, [text or " "])
        with mmattn.inspect.record(self.model) as weights:
            self.model(input_ids=torch.tensor([ids], device=memory.device), memory=memory)
        rows, columns = self.eye.grid
        # What a token attended to is seen where it was predicted: at the one before.
        return mmattn.inspect.Trace(
            [self.tokenizer.decode([one]) for one in ids[1:-1]],
            [f"row {row + 1}, column {column + 1}" for row in range(rows) for column in range(columns)],
            torch.stack([calls[0][0, :, :-2] for _, calls in sorted(weights.items())]),
            [f"layer {layer}" for _, layer in sorted(weights)],
            text,
            grid=self.eye.grid,
            picture=self.seen(image),
        )

    def seen(self, image: Any) -> Any:
        """A picture as the encoder sees it: small, and of a long one the middle."""
        prepared = self.eye.image_processor
        (pixels,) = prepared([image])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (prepared.mean, prepared.std))
        return mmattn.load_image((255 * (pixels * std + mean)).round().clamp(0, 255).byte())


USED = ("encoder", "lm", "device", "caption")


def open_run(adapter: str | Path) -> tuple[Config, Any, Any, Any]:
    """The settings, model, tokenizer and encoder that belong to an adapter's folder."""
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
