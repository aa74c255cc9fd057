"""Real handwriting: scikit-learn's 1,797 digits, what can be measured of each, and what can be said of it.

Three measures of a picture (ink from 0 to 1), each standardised within its digit on the training pictures:

* stroke: ink divided by the length of its outline, so *thick* and *thin*;
* slant: how far ink moves right as it moves up, so *slanted right* and *left*;
* width: spread of the ink from side to side, so *wide* and *narrow*.

A picture is called by a word if its measure is more than `THRESHOLD` standard deviations from the middle of its digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MEASURES = ("stroke", "slant", "width")
THRESHOLD = 0.6
# For each measure: the words for much of it and for little of it; several words mean the same.
WORDS = {
    "stroke": (("thick", "bold", "heavy"), ("thin", "fine", "light")),
    "slant": (("slanted right", "leaning right"), ("slanted left", "leaning left")),
    "width": (("wide", "broad"), ("narrow", "slim")),
}
TEMPLATES = (
    "a {adjectives} {number} {clause}",
    "a handwritten {adjectives} {number} {clause}",
    "the {adjectives} digit {number} {clause}",
    "a {adjectives} handwritten digit {number} {clause}",
    "{adjectives} {number} {clause}",
    "a picture of a {adjectives} {number} {clause}",
    "write a {adjectives} {number} {clause}",
)


@dataclass
class Digits:
    """Pictures (n, 1, size, size) from -1 (paper) to 1 (ink), their digits (n,) and standardised measures (n, 3)."""

    pictures: Tensor
    digits: Tensor
    measures: Tensor

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, rows: slice | Tensor) -> Digits:
        """The same of these rows."""
        return Digits(self.pictures[rows], self.digits[rows], self.measures[rows])


@dataclass
class Scale:
    """Mean and standard deviation of each measure within each digit, (10, 3), by which all others are standardised."""

    mean: Tensor
    deviation: Tensor

    def __call__(self, raw: Tensor, digits: Tensor) -> Tensor:
        """Measures (n, 3) in standard deviations from the middle of their digit."""
        return (raw - self.mean[digits]) / self.deviation[digits]


def load_digits(size: int = 16, held_out: float = 0.2) -> tuple[Digits, Digits, Scale]:
    """Training pictures, held-out pictures, and the scale of the measures; every fifth picture is held out."""
    from sklearn.datasets import load_digits as load_sklearn

    raw = load_sklearn()
    pictures = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    pictures = F.interpolate(pictures, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    digits = torch.tensor(raw.target)
    every = round(1 / held_out)
    away = torch.arange(len(digits)) % every == every - 1
    measured = measure(pictures)
    known, own = measured[~away], digits[~away]
    scale = Scale(
        torch.stack([known[own == digit].mean(0) for digit in range(10)]),
        torch.stack([known[own == digit].std(0) for digit in range(10)]),
    )
    whole = Digits(2 * pictures - 1, digits, scale(measured, digits))
    return whole[~away], whole[away], scale


def measure(ink: Tensor) -> Tensor:
    """Stroke, slant and width (n, 3) of pictures (n, 1, size, size) whose ink is from 0 to 1."""
    ink = ink[:, 0].clamp(0, 1)
    size = ink.shape[-1]
    total = ink.sum((1, 2)).clamp(min=1e-6)
    across = F.pad(ink, (1, 1, 1, 1))
    outline = (across[:, 1:] - across[:, :-1]).abs().sum((1, 2)) + (across[:, :, 1:] - across[:, :, :-1]).abs().sum(
        (1, 2)
    )
    places = (torch.arange(size) + 0.5) / size
    x, y = places[None, None, :], 1 - places[None, :, None]
    x, y = (axis - (ink * axis).sum((1, 2), keepdim=True) / total[:, None, None] for axis in (x, y))
    xx, yy, xy = ((ink * product).sum((1, 2)) / total for product in (x * x, y * y, x * y))
    return torch.stack([total / outline.clamp(min=1e-6), xy / yy.clamp(min=1e-6), xx.sqrt()], 1)


def asked_for(measures: Tensor, random: Random, chance: float = 0.7) -> dict[str, int]:
    """Some of the words that fit a picture's measures (3,): {measure: +1 or -1}, each kept with this chance."""
    said = {}
    for name, value in zip(MEASURES, measures.tolist(), strict=True):
        if abs(value) > THRESHOLD and random.random() < chance:
            said[name] = 1 if value > 0 else -1
    return said


def describe(digit: int, said: dict[str, int], random: Random) -> str:
    """A sentence for a digit with some attributes.

    >>> describe(7, {"stroke": 1}, Random(3))
    'write a bold seven'
    """
    adjectives, clauses = [], []
    for name, sign in said.items():
        word = random.choice(WORDS[name][0 if sign > 0 else 1])
        (clauses if name == "slant" and random.random() < 0.7 else adjectives).append(word)
    random.shuffle(adjectives)
    number = random.choice((NUMBERS[digit], NUMBERS[digit], str(digit)))
    text = random.choice(TEMPLATES).format(adjectives=" ".join(adjectives), number=number, clause=" ".join(clauses))
    return " ".join(text.split())


def vocabulary() -> list[str]:
    """Every word that `describe` may use."""
    words = {word for template in TEMPLATES for word in template.split() if "{" not in word}
    words |= {part for both in WORDS.values() for group in both for word in group for part in word.split()}
    return sorted(words | set(NUMBERS) | {str(digit) for digit in range(10)})
