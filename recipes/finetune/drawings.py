"""Draw small pictures with captions, to try the recipe on: six things in six colours at four places.

    python -m recipes.finetune.drawings drawings
    mmattn train recipes/finetune/config.yaml data.path=drawings

`train` has each of the 144 combinations once, `val` 48 of them drawn anew. Sizes, shades and backgrounds vary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

SIDE, HELD_OUT = 160, 48
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
    """Draw a thing in a shade of a colour, near a place, on a background of any pale colour."""
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
    """Write the pictures and captions into `train` and `val`, as `load_dataset("imagefolder")` reads them."""
    random, every = Random(seed), list(itertools.product(THINGS, COLOURS, PLACES))
    for split, chosen in (("train", every), ("val", random.sample(every, HELD_OUT))):
        (folder / split).mkdir(parents=True)
        lines = []
        for number, (thing, colour, place) in enumerate(chosen):
            draw(thing, colour, place, random).save(folder / split / f"{number:03}.png")
            lines.append({"file_name": f"{number:03}.png", "text": f"A {colour} {thing} at the {place}."})
        (folder / split / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    make(**vars(parser.parse_args()))
