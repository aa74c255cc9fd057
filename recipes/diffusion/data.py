"""scikit-learn's 1,797 handwritten digits, measures of their style, and sentences about both.

* stroke: ink divided by the length of its outline, so *thick* and *thin*;
* slant: how far ink moves right as it moves up, so *slanted right* and *left*;
* width: spread of the ink from side to side, so *wide* and *narrow*.

Each measure is standardised within its digit on the training pictures; a word is used beyond `THRESHOLD` standard
deviations from the middle of the digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

THRESHOLD = 0.6
HELD_OUT = 5  # every fifth picture
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# For a high and for a low value of each measure.
WORDS = {
    "stroke": (("thick", "bold", "heavy"), ("thin", "fine", "light")),
    "slant": (("slanted right", "leaning right"), ("slanted left", "leaning left")),
    "width": (("wide", "broad"), ("narrow", "slim")),
}
TEMPLATES = (
    "a {adjectives} {name} {clause}",
    "a handwritten {adjectives} {name} {clause}",
    "the {adjectives} digit {name} {clause}",
    "a {adjectives} handwritten digit {name} {clause}",
    "{adjectives} {name} {clause}",
    "a picture of a {adjectives} {name} {clause}",
    "write a {adjectives} {name} {clause}",
)


@dataclass
class Pictures:
    """Pictures (n, c, size, size) from -1 to 1, their digits (n,) and standardised measures (n, 3)."""

    pictures: Tensor
    classes: Tensor
    measures: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, rows: slice | Tensor) -> Pictures:
        return Pictures(self.pictures[rows], self.classes[rows], self.measures[rows])


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation (10, 3) of each measure within each digit of the training pictures."""

    mean: Tensor
    deviation: Tensor

    def measure(self, pictures: Tensor, classes: Tensor) -> Tensor:
        """Return the standardised measures (n, 3) of pictures of these digits (n,)."""
        return (measure_style(pictures) - self.mean[classes]) / self.deviation[classes]


def load_data(size: int = 16, channels: int = 1) -> tuple[Pictures, Pictures, Scale]:
    """Return training pictures, held-out pictures, and the scale of their measures."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    ink = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    ink = F.interpolate(ink, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    pictures, classes = (2 * ink - 1).expand(-1, channels, -1, -1), torch.tensor(raw.target)
    held_out = torch.arange(len(pictures)) % HELD_OUT == HELD_OUT - 1
    measures = measure_style(pictures)
    digits = [measures[~held_out & (classes == digit)] for digit in range(10)]
    scale = Scale(torch.stack([one.mean(0) for one in digits]), torch.stack([one.std(0) for one in digits]))
    data = Pictures(pictures, classes, scale.measure(pictures, classes))
    return data[~held_out], data[held_out], scale


def measure_style(pictures: Tensor) -> Tensor:
    """Return stroke, slant and width (n, 3) of pictures (n, c, size, size), ink from -1 for paper to 1."""
    ink = ((pictures.mean(1) + 1) / 2).clamp(0, 1)
    size = ink.shape[-1]
    total = ink.sum((1, 2)).clamp(min=1e-6)
    padded = F.pad(ink, (1, 1, 1, 1))
    outline = padded.diff(dim=1).abs().sum((1, 2)) + padded.diff(dim=2).abs().sum((1, 2))
    places = (torch.arange(size) + 0.5) / size
    x, y = places[None, None, :], 1 - places[None, :, None]
    x, y = (axis - (ink * axis).sum((1, 2), keepdim=True) / total[:, None, None] for axis in (x, y))
    xx, yy, xy = ((ink * product).sum((1, 2)) / total for product in (x * x, y * y, x * y))
    return torch.stack([total / outline.clamp(min=1e-6), xy / yy.clamp(min=1e-6), xx.sqrt()], 1)


def describe(digit: int, signs: Mapping[str, int], random: Random) -> str:
    """Return a random sentence for a digit with attributes: 7 and {"stroke": 1} may give "thick 7"."""
    adjectives, clauses = [], []
    for name, sign in signs.items():
        word = random.choice(WORDS[name][0 if sign > 0 else 1])
        (clauses if name == "slant" and random.random() < 0.7 else adjectives).append(word)
    random.shuffle(adjectives)
    # Twice in words for each time in figures.
    name = random.choice((NUMBERS[digit], NUMBERS[digit], str(digit)))
    text = random.choice(TEMPLATES).format(adjectives=" ".join(adjectives), name=name, clause=" ".join(clauses))
    return " ".join(text.split())


def plain(digit: int) -> str:
    """Return the sentence that names the digit alone: "a seven"."""
    return f"a {NUMBERS[digit]}"


def choose_attributes(measures: Tensor, random: Random, chance: float = 0.7) -> dict[str, int]:
    """Return {measure: +1 or -1} of attributes that fit a picture's measures (3,), each with this chance."""
    signs = {}
    for name, value in zip(WORDS, measures.tolist(), strict=True):
        if abs(value) > THRESHOLD and random.random() < chance:
            signs[name] = 1 if value > 0 else -1
    return signs


def style_words(measures: Tensor) -> str:
    """Return the words for a picture's measures (3,), such as "thick, slanted left", or "as most are"."""
    pairs = zip(WORDS.values(), measures.tolist(), strict=True)
    words = [both[0 if value > 0 else 1][0] for both, value in pairs if abs(value) > THRESHOLD]
    return ", ".join(words) or "as most are"


def vocabulary() -> list[str]:
    """Return every word and phrase of `describe`."""
    texts = {word for template in TEMPLATES for word in template.split() if "{" not in word}
    texts |= {word for both in WORDS.values() for group in both for word in group}
    return sorted(texts | {*NUMBERS, *map(str, range(10))})


def sample_sentences() -> list[str]:
    """Return the sentences of the grids: one for a high and one for a low value of each measure."""
    random, sides = Random(1), [(name, sign) for name in WORDS for sign in (1, -1)]
    return [describe((7 + index // 2) % 10, {name: sign}, random) for index, (name, sign) in enumerate(sides)]
