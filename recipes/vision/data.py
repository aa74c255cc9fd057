"""Pictures with texts that are true of them: drawn flowers, a folder, or Flowers-102."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from mmattn.errors import ConfigError

from . import flora
from .settings import DataSettings

PICTURES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"}


@dataclass(frozen=True)
class Species:
    """What captions are checked against: a name, and the words that are true of it."""

    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A picture, what identifies it, the species on it (None: not said), and the texts that are true of it."""

    image: Any
    key: str
    species: int | None
    texts: tuple[int, ...]


@dataclass(frozen=True)
class Data:
    """Pictures to train on and pictures to measure on. Texts may be shared between the two, pictures never are."""

    train: list[Picture]
    held_out: list[Picture]
    texts: list[str]
    species: list[Species]


def load_data(settings: DataSettings, seed: int) -> Data:
    """The data of a run.

    Raises:
        ConfigError: the pictures or their descriptions are not there.
    """
    if settings.kind == "flora":
        return _flora(settings, seed)
    if settings.path is None:
        raise ConfigError(f"data.kind={settings.kind} needs data.path=FOLDER")
    folder = Path(settings.path)
    if settings.kind == "flowers102":
        return _flowers102(folder, settings)
    if not folder.is_dir():
        raise ConfigError(f"data.path: there is no folder {folder}")
    if (folder / "captions.jsonl").is_file():
        return _captions(folder, settings.held_out, seed)
    return _classes(folder, settings, seed)


def _flora(settings: DataSettings, seed: int) -> Data:
    texts: list[str] = []
    species: list[Species] = []
    for one in flora.species():
        said = flora.descriptions(one)
        species.append(Species(one.name, one.attributes, tuple(range(len(texts), len(texts) + len(said)))))
        texts += said
    sources = hashlib.sha256()
    for name in ("flora.py", "flora_draw.py", "flora_shapes.py", "flora_species.yaml"):
        sources.update(Path(flora.__file__).with_name(name).read_bytes())
    places = {one.name: place for place, one in enumerate(species)}

    def pictures(split: str, count: int) -> list[Picture]:
        made = []
        for number, (image, _, name) in enumerate(flora.dataset(split, count, seed, settings.size)):
            key = f"{sources.hexdigest()}/{split}/{count}/{seed}/{settings.size}/{number}"
            made.append(Picture(image, key, places[name], species[places[name]].texts))
        return made

    train = pictures("train", settings.train_per_species)
    return Data(train, pictures("held-out", settings.held_out_per_species), texts, species)


def _classes(folder: Path, settings: DataSettings, seed: int) -> Data:
    """One folder per class, and a file {class: {"name", "descriptions", "attributes"}} or {class: [descriptions]}."""
    described = _read_descriptions(settings.descriptions)
    classes = sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))
    missing = [sub.name for sub in classes if sub.name not in described]
    if not classes or missing:
        raise ConfigError(
            f"{folder} must hold one folder of pictures per class, each described in {settings.descriptions}; "
            + (f"not described: {', '.join(missing[:5])}" if classes else "it holds no folders")
        )
    texts: list[str] = []
    species: list[Species] = []
    train: list[Picture] = []
    held_out: list[Picture] = []
    for place, sub in enumerate(classes):
        one = described[sub.name]
        one = {"descriptions": one} if isinstance(one, list) else one
        if not one.get("descriptions"):
            raise ConfigError(f"{settings.descriptions} has no descriptions of {sub.name!r}")
        own = tuple(range(len(texts), len(texts) + len(one["descriptions"])))
        texts += one["descriptions"]
        species.append(Species(one.get("name", sub.name), one.get("attributes", {}), own))
        files = sorted(file for file in sub.iterdir() if file.suffix.lower() in PICTURES)
        if len(files) < 2:
            raise ConfigError(f"{sub} holds {len(files)} pictures; training and measuring need at least one each")
        first, second = _split([Picture(str(file), _hash(file), place, own) for file in files], settings.held_out, seed)
        train, held_out = train + first, held_out + second
    return Data(train, held_out, texts, species)


def _captions(folder: Path, share: float, seed: int) -> Data:
    """Lines {"file", "caption"} and, if known, "species"; a file may have several lines."""
    lines: dict[str, list[int]] = {}
    named: dict[str, str] = {}
    texts: list[str] = []
    for number, line in enumerate((folder / "captions.jsonl").read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            file, caption = entry["file"], entry["caption"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f'{folder}/captions.jsonl, line {number}: {{"file", "caption"}} expected') from error
        if not isinstance(file, str) or not (folder / file).is_file():
            raise ConfigError(f"{folder}/captions.jsonl, line {number}: there is no picture {file!r}")
        lines.setdefault(file, []).append(len(texts))
        texts.append(caption)
        if entry.get("species"):
            named[file] = entry["species"]
    names = sorted(set(named.values()))
    own = {name: tuple(t for file in lines if named.get(file) == name for t in lines[file]) for name in names}
    pictures = [
        Picture(str(folder / file), _hash(folder / file), names.index(named[file]) if file in named else None, tuple(t))
        for file, t in lines.items()
    ]
    if len(pictures) < 2:
        raise ConfigError(f"{folder}/captions.jsonl names {len(pictures)} pictures; at least two are needed")
    first, second = _split(pictures, share, seed)
    return Data(first, second, texts, [Species(name, {}, own[name]) for name in names])


def _flowers102(folder: Path, settings: DataSettings) -> Data:
    """torchvision's dataset class; its own test split is held out."""
    from torchvision.datasets import Flowers102

    try:
        parts = {
            split: Flowers102(str(folder), split, download=settings.download) for split in ("train", "val", "test")
        }
    except RuntimeError as error:
        raise ConfigError(f"Flowers-102 is not in {folder} ({error}); data.download=true fetches it") from error
    described = _read_descriptions(settings.descriptions) if settings.descriptions else {}
    texts: list[str] = []
    species: list[Species] = []
    for name in parts["train"].classes:
        one = described.get(name, [f"This flower is called {name}.", f"A photograph of {name}, in flower."])
        one = {"descriptions": one} if isinstance(one, list) else one
        own = tuple(range(len(texts), len(texts) + len(one["descriptions"])))
        texts += one["descriptions"]
        species.append(Species(one.get("name", name), one.get("attributes", {}), own))

    def pictures(split: str) -> list[Picture]:
        part = parts[split]
        files = zip(part._image_files, part._labels, strict=True)
        return [Picture(str(file), _hash(Path(file)), label, species[label].texts) for file, label in files]

    return Data(pictures("train") + pictures("val"), pictures("test"), texts, species)


def _split(pictures: list[Picture], share: float, seed: int) -> tuple[list[Picture], list[Picture]]:
    shuffled = sorted(pictures, key=lambda picture: picture.key)
    Random(seed).shuffle(shuffled)
    held = min(len(shuffled) - 1, max(1, round(share * len(shuffled))))
    return shuffled[held:], shuffled[:held]


def _read_descriptions(path: str | None) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        raise ConfigError(f"data.descriptions must name a file of descriptions, got {path!r}")
    text = Path(path).read_text(encoding="utf-8-sig")
    read = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    if not isinstance(read, dict):
        raise ConfigError(f"{path} must hold a mapping from class to descriptions, got {type(read).__name__}")
    return read


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
