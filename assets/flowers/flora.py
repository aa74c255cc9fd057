"""Flora: drawn pictures of 48 real flower species with true descriptions, made by code, the same for the same seed.

    python -m assets.flowers.flora

draws the pictures of this folder, which the recipe vision trains on, and those of `assets/flora`. The facts stand in
`flora_species.yaml`; `flora_shapes.py` paints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import yaml
from PIL import Image

from .flora_draw import paint
from .flora_shapes import PAINTERS

FOLDER = Path(__file__).parent
DEMO = ("daffodil", "field poppy", "passion flower", "foxglove", "bee orchid", "snowdrop", "cornflower", "water lily")

# Filled with the facts of a species; every one names it once and says looks, season and place.
TEMPLATES = (
    "This is {a}: it has {looks} and is found {place} in {season}.",
    "In {season}, {place}, you may meet {the}; look for {looks}.",
    "{Looks}: such is the flower of {the}, seen {place} in {season}.",
    "Flowering in {season}, {the} shows {looks}, with {leaves}.",
    "With {looks}, {the} is a {season} flower that grows {place}.",
    "Here you see {looks}: {the}, a flower of {season} that grows {place}.",
)
TEMPLATES_PER_SPECIES = 4


@dataclass(frozen=True)
class Species:
    """A species of `flora_species.yaml`: its facts, the phrases that say them, and how it is painted."""

    name: str
    latin: str
    shape: str
    petals: int  # of one flower as drawn; 0 where they are too small or too many to count
    colour: str
    centre: str
    leaf: str
    season: str
    habitat: str
    height: int  # centimetres
    looks: str
    leaves: str
    place: str
    said: list[str]
    draw: Mapping[str, Any]
    mass: bool = False  # a mass noun: "lavender", not "a lavender"

    @property
    def the(self) -> str:
        """Return the name with the definite article."""
        return self.name if self.mass else f"the {self.name}"

    @property
    def a(self) -> str:
        """Return the name with the indefinite article."""
        return self.name if self.mass else f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def attributes(self) -> dict[str, str]:
        """Return the facts that captions are checked for, as the words of the descriptions."""
        return {"colour": self.colour, "shape": self.shape, "season": self.season, "habitat": self.habitat}


@lru_cache(maxsize=1)
def species() -> tuple[Species, ...]:
    """Return all species, in a fixed order."""
    records = yaml.safe_load((FOLDER / "flora_species.yaml").read_text(encoding="utf-8"))
    return tuple(Species(**record.pop("facts"), **record) for record in records)


def draw(one: Species, seed: int | str, size: int = 64) -> Image.Image:
    """Draw one plant as an RGB picture of `size` pixels a side; the same seed gives the same picture."""
    return paint(one.draw, one.leaf, PAINTERS, Random(f"{one.name}/{seed}"), size)


def descriptions(one: Species) -> list[str]:
    """Return seven descriptions: the ones written for this species, and four from templates in turn."""
    first = species().index(one)
    words = {"a": one.a, "the": one.the, "looks": one.looks, "leaves": one.leaves, "place": one.place}
    words |= {"season": one.season, "Looks": one.looks[0].upper() + one.looks[1:]}
    chosen = (TEMPLATES[(first + step) % len(TEMPLATES)] for step in range(TEMPLATES_PER_SPECIES))
    return [*one.said, *(template.format(**words) for template in chosen)]


def dataset(split: str, per_species: int, seed: int = 0, size: int = 64) -> Iterator[tuple[Image.Image, str, str]]:
    """Yield (picture, description, species name) of new plants; "train" and "held-out" share no picture."""
    for one in species():
        texts, order = descriptions(one), Random(f"{one.name}/{split}/{seed}")
        for index in range(per_species):
            yield draw(one, f"{split}/{seed}/{index}", size), order.choice(texts), one.name


def save_demo(folder: Path, size: int = 128) -> None:
    """Write the demo pictures and `metadata.jsonl` (file_name, species, text) into a folder."""
    by_name, lines = {one.name: one for one in species()}, []
    for name in DEMO:
        file = f"{name.replace(' ', '-')}.png"
        draw(by_name[name], "demo/6", size).save(folder / file, optimize=True)
        lines.append(json.dumps({"file_name": file, "species": name, "text": descriptions(by_name[name])[0]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def save_pictures(folder: Path, per_species: int = 46, size: int = 64) -> None:
    """Write so many pictures of each species into a folder of its name, and `descriptions.json` beside these."""
    about = {}
    for one in species():
        place = folder / "pictures" / one.name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        for number in range(per_species):
            draw(one, f"train/0/{number}", size).save(place / f"{number:02}.webp", quality=80)
        about[place.name] = {"name": one.name, "attributes": one.attributes, "descriptions": descriptions(one)}
    (folder / "descriptions.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    save_pictures(FOLDER)
    save_demo(FOLDER.parent / "flora")
