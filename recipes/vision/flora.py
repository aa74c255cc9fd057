"""Flora: drawn pictures of 48 real flower species with true descriptions, made by code, the same for the same seed.

The facts stand in `flora_species.yaml`; `flora_shapes.py` paints. Look at some, as one sheet:

    python flora.py sheet.png            # one row of pictures per species
    python flora.py --demo ../../assets/flora
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import yaml
from PIL import Image

from .flora_draw import paint
from .flora_shapes import PAINTERS

SPLITS = ("train", "held-out")

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
    """One flower: its facts, the phrases that say them, and how it is painted."""

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
    said: tuple[str, ...]
    recipe: Mapping[str, Any]
    mass: bool = False  # a mass noun: "lavender", not "a lavender"

    @property
    def the(self) -> str:
        return self.name if self.mass else f"the {self.name}"

    @property
    def a(self) -> str:
        return self.name if self.mass else f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def attributes(self) -> dict[str, str]:
        """The facts a caption can be checked for, as the words the descriptions use."""
        return {"colour": self.colour, "shape": self.shape, "season": self.season, "habitat": self.habitat}


@lru_cache(maxsize=1)
def _species() -> tuple[Species, ...]:
    records = yaml.safe_load(Path(__file__).with_name("flora_species.yaml").read_text(encoding="utf-8"))
    return tuple(
        Species(
            name=r["name"],
            looks=r["looks"],
            leaves=r["leaves"],
            place=r["place"],
            said=tuple(r["said"]),
            recipe=MappingProxyType(r["draw"]),
            mass=r.get("mass", False),
            **r["facts"],
        )
        for r in records
    )


def species() -> list[Species]:
    """All species, in a fixed order."""
    return list(_species())


def find(name: str) -> Species:
    """The species of this name.

    Raises:
        KeyError: there is none.

    >>> find("daffodil").season
    'spring'
    """
    for one in _species():
        if one.name == name:
            return one
    raise KeyError(f"no species is called {name!r}; there are: {', '.join(one.name for one in _species())}")


def draw(one: Species, seed: int | str, size: int = 64) -> Image.Image:
    """The picture of one plant, RGB, `size` pixels a side; the same seed gives the same picture.

    Raises:
        ValueError: `size` is below 16.
    """
    if size < 16:
        raise ValueError(f"size must be at least 16 pixels, got {size}: smaller flowers cannot be told apart")
    return paint(one.recipe, one.leaf, PAINTERS, Random(f"{one.name}/{seed}"), size)


def descriptions(one: Species) -> list[str]:
    """Seven descriptions: the ones written for this species, and four from templates in turn."""
    first = _species().index(one) if one in _species() else 0
    words = {"a": one.a, "the": one.the, "looks": one.looks, "leaves": one.leaves, "place": one.place}
    words |= {"season": one.season, "Looks": one.looks[0].upper() + one.looks[1:]}
    chosen = (TEMPLATES[(first + step) % len(TEMPLATES)] for step in range(TEMPLATES_PER_SPECIES))
    return [*one.said, *(template.format(**words) for template in chosen)]


def dataset(split: str, per_species: int, seed: int = 0, size: int = 64) -> Iterator[tuple[Image.Image, str, str]]:
    """(picture, description, species name) for `per_species` new plants of each species, species by species.

    The splits share descriptions and no picture: what is held out are the plants.

    Raises:
        ValueError: `split` is neither "train" nor "held-out".
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(map(repr, SPLITS))}; got {split!r}")
    for one in _species():
        said, order = descriptions(one), Random(f"{one.name}/{split}/{seed}")
        for index in range(per_species):
            yield draw(one, f"{split}/{seed}/{index}", size), order.choice(said), one.name


def sheet(columns: int = 8, size: int = 64, seed: int = 0) -> Image.Image:
    """All species on one sheet, `columns` plants a species, two species a row."""
    known = _species()
    page = Image.new("RGB", (2 * columns * size + size // 4, (len(known) + 1) // 2 * size), "white")
    for index, one in enumerate(known):
        left = (index % 2) * (columns * size + size // 4)
        for column in range(columns):
            page.paste(draw(one, f"sheet/{seed}/{column}", size), (left + column * size, index // 2 * size))
    return page


DEMO = ("daffodil", "field poppy", "passion flower", "foxglove", "bee orchid", "snowdrop", "cornflower", "water lily")


def save_demo(folder: Path, size: int = 128) -> None:
    """Write the demo pictures and `captions.jsonl` (file, species, caption) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in DEMO:
        file = f"{name.replace(' ', '-')}.png"
        draw(find(name), "demo/6", size).save(folder / file, optimize=True)
        lines.append(json.dumps({"file": file, "species": name, "caption": descriptions(find(name))[0]}))
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw flora as one sheet, or write the demo pictures.")
    parser.add_argument("sheet", nargs="?", type=Path, help="where the sheet goes (a .png)")
    parser.add_argument("--demo", type=Path, help="folder for the demo pictures")
    parser.add_argument("--size", type=int, default=64)
    given = parser.parse_args()
    if given.sheet:
        sheet(size=given.size).save(given.sheet)
    if given.demo:
        save_demo(given.demo)
