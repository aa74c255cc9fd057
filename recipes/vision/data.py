"""Pictures with descriptions: drawn flowers, or a folder of photographs; and the memories of these pictures."""

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
from mmattn.errors import ConfigError

from . import flora
from .settings import DataSettings

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"}


@dataclass(frozen=True)
class Species:
    """A class of pictures: name, attributes ("colour": "blue"), and the numbers of its descriptions."""

    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Picture:
    """An image (or its path), a key that identifies it, and the number of its species."""

    image: Any
    key: str
    species: int


@dataclass(frozen=True)
class Data:
    """Pictures to train on and others to measure on. Both share species and descriptions, never a picture."""

    train: list[Picture]
    held_out: list[Picture]
    texts: list[str]
    species: list[Species]

    def texts_of(self, picture: Picture) -> tuple[int, ...]:
        """Return the numbers of the descriptions of a picture."""
        return self.species[picture.species].texts


def load_data(settings: DataSettings, seed: int) -> Data:
    """Draw flowers or read a folder of pictures.

    Raises:
        ConfigError: the pictures or their descriptions are not there.
    """
    return _draw_flora(settings, seed) if settings.kind == "flora" else _read_folder(settings, seed)


def encode(encoder: Any, pictures: list[Picture], folder: Path, *, mirror: bool, progress: bool) -> mmattn.Memory:
    """Encode pictures once; later runs read the file that is named after the encoder and the pictures."""
    name = hashlib.sha256(f"{encoder.fingerprint} {mirror}".encode())
    for picture in pictures:
        name.update(picture.key.encode())
    file = folder / f"memory-{name.hexdigest()[:24]}.safetensors"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        images = [ImageOps.mirror(mmattn.load_image(p.image)) if mirror else p.image for p in pictures]
        memory = encoder(images, progress=progress)
        mmattn.Memory(memory.tokens.half(), memory.mask).save(file)  # half precision halves the file
    return mmattn.Memory.load(file).to(torch.float32)


def _draw_flora(settings: DataSettings, seed: int) -> Data:
    texts: list[str] = []
    species = [_add_species(texts, one.name, one.attributes, flora.descriptions(one)) for one in flora.species()]
    numbers = {one.name: number for number, one in enumerate(species)}
    source = hashlib.sha256()
    for name in ("flora.py", "flora_draw.py", "flora_shapes.py", "flora_species.yaml"):
        source.update(Path(flora.__file__).with_name(name).read_bytes())

    def draw(split: str, count: int) -> list[Picture]:
        key = f"{source.hexdigest()}/{split}/{count}/{seed}/{settings.size}"
        drawings = enumerate(flora.dataset(split, count, seed, settings.size))
        return [Picture(image, f"{key}/{number}", numbers[name]) for number, (image, _, name) in drawings]

    train = draw("train", settings.train_per_species)
    return Data(train, draw("held-out", settings.held_out_per_species), texts, species)


def _read_folder(settings: DataSettings, seed: int) -> Data:
    """Read one folder of pictures per class, and a file {class: {"name", "descriptions", "attributes"}}."""
    if settings.path is None or not Path(settings.path).is_dir():
        raise ConfigError(f"data.kind=folder needs data.path=FOLDER; there is no folder {settings.path}")
    descriptions = _read_descriptions(settings.descriptions)
    classes = sorted(sub for sub in Path(settings.path).iterdir() if sub.is_dir() and not sub.name.startswith("."))
    missing = [sub.name for sub in classes if not descriptions.get(sub.name, {}).get("descriptions")]
    if not classes or missing:
        raise ConfigError(
            f"{settings.path} must hold a folder of pictures per class, each described in {settings.descriptions}; "
            f"without description: {', '.join(missing[:5]) or 'no folders'}"
        )
    data = Data([], [], [], [])
    for number, sub in enumerate(classes):
        one = descriptions[sub.name]
        name, attributes = one.get("name", sub.name), one.get("attributes", {})
        data.species.append(_add_species(data.texts, name, attributes, one["descriptions"]))
        files = [file for file in sorted(sub.iterdir()) if file.suffix.lower() in SUFFIXES]
        if len(files) < 2:
            raise ConfigError(f"{sub} holds {len(files)} pictures; training and measuring need at least one each")
        pictures = [Picture(str(file), hashlib.sha256(file.read_bytes()).hexdigest(), number) for file in files]
        pictures.sort(key=lambda picture: picture.key)
        Random(seed).shuffle(pictures)
        count = min(len(pictures) - 1, max(1, round(settings.held_out * len(pictures))))
        data.held_out.extend(pictures[:count])
        data.train.extend(pictures[count:])
    return data


def _add_species(texts: list[str], name: str, attributes: Mapping[str, str], descriptions: list[str]) -> Species:
    texts.extend(descriptions)
    return Species(name, attributes, tuple(range(len(texts) - len(descriptions), len(texts))))


def _read_descriptions(path: str | None) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        raise ConfigError(f"data.descriptions must name a file of descriptions, got {path!r}")
    text = Path(path).read_text(encoding="utf-8-sig")
    content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping from class to descriptions, got {type(content).__name__}")
    return {name: {"descriptions": one} if isinstance(one, list) else one for name, one in content.items()}
