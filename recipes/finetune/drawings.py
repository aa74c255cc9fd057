"""Draw small pictures with captions, to try the recipe on: six things in six colours at four places.

    python mine/drawings.py drawings
    mmattn train mine/config.yaml data.path=drawings

`train` has each of the 144 combinations once, `val` has 48 of them, drawn anew. Sizes, shades and backgrounds vary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

from mmattn import models

SIDE, HELD_OUT = 160, 48
SHAPES = ("circle", "rectangle", "triangle")
COLOURS = {
    "red": (205, 40, 40),
    "green": (45, 150, 60),
    "blue": (40, 80, 200),
    "yellow": (235, 205, 40),
    "purple": (135, 60, 165),
    "brown": (125, 80, 45),
}
PLACES = {"left": (0.27, 0.5), "right": (0.73, 0.5), "top": (0.5, 0.27), "bottom": (0.5, 0.73)}
#: Polygons and ellipses of each thing, in units of half its size around its middle.
THINGS = {
    "house": ([(-0.8, 1), (-0.8, -0.1), (-1, -0.1), (0, -1), (1, -0.1), (0.8, -0.1), (0.8, 1)],),
    "tree": ([(-0.2, 1), (-0.2, 0.2), (0.2, 0.2), (0.2, 1)], (-0.8, -1, 0.8, 0.4)),
    "car": (
        [(-1, 0.5), (-1, 0), (-0.5, -0.1), (-0.3, -0.6), (0.4, -0.6), (0.6, -0.1), (1, 0), (1, 0.5)],
        (-0.7, 0.2, -0.2, 0.8),
        (0.2, 0.2, 0.7, 0.8),
    ),
    "boat": ([(-1, 0.3), (1, 0.3), (0.6, 0.9), (-0.6, 0.9)], [(0, -1), (0, 0.1), (0.8, 0.1)]),
    "star": (
        [(math.sin(k * math.pi / 5) * r, -math.cos(k * math.pi / 5) * r) for k in range(10) for r in [1 - k % 2 * 0.6]],
    ),
    "fish": ((-0.6, -0.5, 1, 0.5), [(-1, -0.6), (-0.4, 0), (-1, 0.6)]),
}


def draw(thing: str, colour: str, place: str, random: Random) -> Image.Image:
    """Draw a thing in a shade of the colour, near the place, on a pale background."""
    picture = Image.new("RGB", (SIDE, SIDE), tuple(random.randint(195, 250) for _ in "rgb"))
    canvas, half = ImageDraw.Draw(picture), random.uniform(0.16, 0.26) * SIDE
    shade = tuple(max(0, min(255, value + random.randint(-20, 20))) for value in COLOURS[colour])
    middle = [SIDE * (at + random.uniform(-0.05, 0.05)) for at in PLACES[place]]
    for shape in THINGS[thing]:
        if isinstance(shape, tuple):
            canvas.ellipse([middle[k % 2] + half * value for k, value in enumerate(shape)], shade)
        else:
            canvas.polygon([(middle[0] + half * x, middle[1] + half * y) for x, y in shape], shade)
    return picture


def make(folder: Path, seed: int = 0) -> None:
    """Draw and save both splits."""
    random, every = Random(seed), list(itertools.product(THINGS, COLOURS, PLACES))
    for split, chosen in (("train", every), ("val", random.sample(every, HELD_OUT))):
        pictures = [(draw(*words, random), "A {1} {0} at the {2}.".format(*words)) for words in chosen]
        save(folder / split, pictures)


def copy_easy_vqa(folder: Path, seed: int = 0) -> None:
    """Copy pictures of easy-VQA, 120 to train on and 48 of its test split, with captions made of their answers."""
    random = Random(seed)
    for split, source, count in (("train", "train", 120), ("val", "test", HELD_OUT)):
        answers: dict[Path, dict[bool, str]] = {}
        for question in models.load_easy_vqa(source):
            if question.answer not in ("yes", "no"):
                answers.setdefault(question.picture, {})[question.answer in SHAPES] = question.answer
        files = random.sample(sorted(file for file, both in answers.items() if len(both) == 2), count)
        save(folder / split, [(Image.open(file), f"A {answers[file][False]} {answers[file][True]}.") for file in files])


def save(folder: Path, pictures: Iterable[tuple[Image.Image, str]]) -> None:
    """Save pictures and their captions as `load_dataset("imagefolder")` reads them."""
    folder.mkdir(parents=True)
    lines = []
    for number, (picture, text) in enumerate(pictures):
        picture.save(folder / f"{number:03}.png")
        lines.append(json.dumps({"file_name": f"{number:03}.png", "text": text}))
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--easy-vqa", action="store_true", help="copy pictures of easy-VQA instead of drawing")
    options = parser.parse_args()
    (copy_easy_vqa if options.easy_vqa else make)(options.folder, options.seed)
