"""Pictures with descriptions of their classes, and the memories of these pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from PIL import ImageOps

import mmattn
from mmattn import models
from mmattn.errors import ConfigError

from .settings import DataSettings

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"}


@dataclass(frozen=True)
class Species:
    """A class of pictures: name, attributes ("colour": "blue"), and the numbers of its descriptions."""

    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    texts: range = range(0)


@dataclass(frozen=True)
class Picture:
    """An image (or its path), a key that identifies it, and its species."""

    image: Any
    key: str
    species: Species


@dataclass(frozen=True)
class Data:
    """Training pictures and held-out pictures. Both share species and descriptions, never a picture."""

    train: list[Picture] = field(default_factory=list)
    held_out: list[Picture] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    species: list[Species] = field(default_factory=list)

    def add_species(self, name: str, attributes: Mapping[str, str], descriptions: list[str]) -> Species:
        """Add a species with its descriptions."""
        self.texts.extend(descriptions)
        numbers = range(len(self.texts) - len(descriptions), len(self.texts))
        self.species.append(Species(name, attributes, numbers))
        return self.species[-1]


def load_data(settings: DataSettings, seed: int) -> Data:
    """Read one folder of pictures per class, and a file {class: {"name", "descriptions", "attributes"}}."""
    place = Path(models.resolve(settings.path))
    if not place.is_dir():
        raise ConfigError(f"data.path is a folder of pictures per class; there is no folder {settings.path}")
    descriptions = read_descriptions(settings.descriptions)
    data = Data()
    for folder in sorted(one for one in place.iterdir() if one.is_dir() and not one.name.startswith(".")):
        about = descriptions.get(folder.name)
        if about is None:
            raise ConfigError(f"{settings.descriptions} has no descriptions of the class {folder.name}")
        species = data.add_species(about.get("name", folder.name), about.get("attributes", {}), about["descriptions"])
        files = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES]
        if len(files) < 2:
            raise ConfigError(f"{folder} holds {len(files)} pictures; training and measuring need at least one each")
        pictures = [Picture(str(file), hashlib.sha256(file.read_bytes()).hexdigest(), species) for file in files]
        pictures.sort(key=lambda picture: picture.key)
        Random(seed).shuffle(pictures)
        count = min(len(pictures) - 1, max(1, round(settings.held_out * len(pictures))))
        data.held_out.extend(pictures[:count])
        data.train.extend(pictures[count:])
    if not data.species:
        raise ConfigError(f"{settings.path} must hold a folder of pictures per class, and has no folders")
    return data


def read_descriptions(path: str) -> dict[str, Any]:
    """Read {class: descriptions or {"name", "descriptions", "attributes"}} from a .json or .yaml."""
    file = Path(models.resolve(path))
    if not file.is_file():
        raise ConfigError(f"data.descriptions must name a file of descriptions, got {path!r}")
    text = file.read_text(encoding="utf-8-sig")
    content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    return {name: {"descriptions": one} if isinstance(one, list) else one for name, one in content.items()}


def encode(encoder: Any, pictures: list[Picture], folder: Path, *, mirror: bool, progress: bool) -> mmattn.Memory:
    """Encode pictures once; later runs read the file that is named after the encoder and the pictures."""
    name = hashlib.sha256("".join([f"{encoder.fingerprint} {mirror}", *(one.key for one in pictures)]).encode())
    file = folder / f"memory-{name.hexdigest()[:24]}.safetensors"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        images = [ImageOps.mirror(mmattn.load_image(p.image)) if mirror else p.image for p in pictures]
        memory = encoder(images, progress=progress)
        mmattn.Memory(memory.tokens.half(), memory.mask).save(file)  # half precision halves the file
    return mmattn.Memory.load(file).to(torch.float32)
