"""What the recipe looks with and speaks with: the encoder, its memories kept in files, the language model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import pipelines
from mmattn.errors import ConfigError
from mmattn.recipes import resolve_asset

from .data import Data, Picture
from .settings import AdapterSettings, Config


def chosen(device: str | torch.device) -> torch.device:
    """The device of a setting: "auto" is an accelerator (cuda, mps, …) where there is one, else the CPU."""
    if device == "auto":
        # A build for CUDA names it also where there is none.
        device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or "cpu"
    return torch.device(device)


def load_encoder(name: str, device: str | torch.device = "auto") -> Any:
    """The encoder of a setting: "torchvision:NAME[:WEIGHTS]", a folder of open_clip, or an open_clip "NAME:TAG"."""
    return pipelines.load_image_encoder(resolve_asset(name), chosen(device))


def load_lm(name: str, device: str | torch.device = "auto") -> tuple[Any, Any]:
    """The frozen language model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = resolve_asset(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        lm = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"lm={name!r} is neither a folder with a language model nor a name on the hub: {error}"
        ) from error
    return lm.to(chosen(device)).eval(), tokenizer


def describe(settings: Config, tokenizer: Any, data: Data) -> pipelines.PipelineConfig:
    """What `mmattn caption` needs of an adapter of this recipe."""
    return pipelines.PipelineConfig(
        task="image-to-text",
        host=pipelines.ModelReference.of(settings.lm, tokenizer),
        encoder=pipelines.EncoderReference.of(settings.encoder),
        generation=settings.caption.model_dump(),
        trained_on=f"{len(data.train)} pictures of {len(data.species)} species ({settings.data.kind}).",
        training={"recipe": "vision", "seed": settings.seed, "steps": settings.optim.max_steps},
    )


def adapter_settings(settings: AdapterSettings, memory_dim: int) -> mmattn.GatedAdapter:
    """The adapter of the settings, for memories of width `memory_dim`."""
    given = settings.model_dump()
    latents = given.pop("latents")
    if given["every"] is None and given["layers"] is None:
        given["every"] = 1
    resampler = None if latents is None else mmattn.Resampler(
        num_latents=latents, num_heads=settings.num_heads, head_dim=settings.head_dim
    )  # fmt: skip
    return mmattn.GatedAdapter(memory_dim=memory_dim, resampler=resampler, **given)


def see(eye: Any, data: Data, config: Config) -> tuple[mmattn.Memory, mmattn.Memory]:
    """Memories of the training pictures (followed by their mirror images, if asked for) and of the held-out ones.

    Computed once: they are kept in a file named after the encoder and the pictures.
    """
    folder = Path(config.data.cache or config.out)
    folder.mkdir(parents=True, exist_ok=True)
    train = _kept(folder, eye, data.train, mirrored=False, progress=config.progress)
    if config.data.flip:
        mirrored = _kept(folder, eye, data.train, mirrored=True, progress=config.progress)
        train = mmattn.Memory.stack([train, mirrored])
    return train, _kept(folder, eye, data.held_out, mirrored=False, progress=config.progress)


def _kept(folder: Path, eye: Any, pictures: list[Picture], *, mirrored: bool, progress: bool) -> mmattn.Memory:
    from PIL import ImageOps

    name = hashlib.sha256(f"{eye.fingerprint} {mirrored}".encode())
    for picture in pictures:
        name.update(picture.key.encode())
    file = folder / f"memory-{name.hexdigest()[:24]}.safetensors"
    if not file.is_file():
        images = [ImageOps.mirror(mmattn.load_image(p.image)) if mirrored else p.image for p in pictures]
        seen = eye(images, progress=progress)
        # Half precision halves the file; sources can be told from the grid.
        mmattn.Memory(seen.tokens.half(), seen.mask).save(file)
    return mmattn.Memory.load(file).to(torch.float32)
