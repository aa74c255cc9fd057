"""What can be measured of a picture, and what can therefore be said of it.

Of writing (`INK`, ink from -1 for paper to 1):

* stroke: ink divided by the length of its outline, so *thick* and *thin*;
* slant: how far ink moves right as it moves up, so *slanted right* and *left*;
* width: spread of the ink from side to side, so *wide* and *narrow*.

Of other pictures (`LIGHT`): brightness, how far colours are from grey, and how fast they change from place to place.

Each measure is standardised within its class on the training pictures; a picture is called by a word if its measure is
more than `THRESHOLD` standard deviations from the middle of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

THRESHOLD = 0.6
TEMPLATES = (
    "a {adjectives} {name} {clause}",
    "a handwritten {adjectives} {name} {clause}",
    "the {adjectives} {kind} {name} {clause}",
    "a {adjectives} handwritten {kind} {name} {clause}",
    "{adjectives} {name} {clause}",
    "a picture of a {adjectives} {name} {clause}",
    "write a {adjectives} {name} {clause}",
)


@dataclass(frozen=True)
class Attributes:
    """Three measures of pictures (n, c, size, size), as (n, 3), and the words for much and for little of each."""

    measure: Callable[[Tensor], Tensor]
    words: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    channels: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.words)


@dataclass(frozen=True)
class Subject:
    """What the pictures show and what can be said of them.

    Args:
        classes: words for each class.
        attributes: the measures and their words.
        mean: of each measure within each class, (classes, 3).
        deviation: standard deviation of each measure within each class, (classes, 3).
    """

    classes: tuple[tuple[str, ...], ...]
    attributes: Attributes
    mean: Tensor
    deviation: Tensor

    def standardised(self, raw: Tensor, classes: Tensor) -> Tensor:
        """Measures (n, 3) in standard deviations from the middle of their class."""
        return (raw - self.mean[classes]) / self.deviation[classes]

    def measure(self, pictures: Tensor, classes: Tensor) -> Tensor:
        """The standardised measures (n, 3) of pictures that should show these classes (n,)."""
        return self.standardised(self.attributes.measure(pictures), classes)

    def plain(self, number: int) -> str:
        """The sentence that says no more than the class: "a seven"."""
        return f"a {self.classes[number][0]}"

    def describe(self, number: int, said: Mapping[str, int], random: Random) -> str:
        """A sentence for a class with some attributes: 7 and {"stroke": 1} may give "thick 7"."""
        adjectives, clauses = [], []
        for name, sign in said.items():
            word = random.choice(self.attributes.words[name][0 if sign > 0 else 1])
            (clauses if name == "slant" and random.random() < 0.7 else adjectives).append(word)
        random.shuffle(adjectives)
        called = random.choice(self.classes[number])
        kind = "digit" if self.classes[0][0] == "zero" else "picture"
        text = random.choice(TEMPLATES).format(
            adjectives=" ".join(adjectives), name=called, clause=" ".join(clauses), kind=kind
        )
        return " ".join(text.split())

    def vocabulary(self) -> list[str]:
        """Everything that `describe` may say, as texts of one or a few words."""
        texts = {word for template in TEMPLATES for word in template.split() if "{" not in word} | {"digit", "picture"}
        texts |= {word for both in self.attributes.words.values() for group in both for word in group}
        return sorted(texts | {name for names in self.classes for name in names})


def asked_for(names: tuple[str, ...], measures: Tensor, random: Random, chance: float = 0.7) -> dict[str, int]:
    """Some of the words that fit a picture's measures (3,): {measure: +1 or -1}, each kept with this chance."""
    said = {}
    for name, value in zip(names, measures.tolist(), strict=True):
        if abs(value) > THRESHOLD and random.random() < chance:
            said[name] = 1 if value > 0 else -1
    return said


def style_words(attributes: Attributes, measures: Tensor) -> str:
    """What a picture's measures (3,) call it, such as "thick, slanted left"; "as most are" where none stands out."""
    pairs = zip(attributes.words.values(), measures.tolist(), strict=True)
    found = [words[0 if value > 0 else 1][0] for words, value in pairs if abs(value) > THRESHOLD]
    return ", ".join(found) or "as most are"


def measure_ink(pictures: Tensor) -> Tensor:
    """Stroke, slant and width (n, 3)."""
    ink = ((pictures.mean(1) + 1) / 2).clamp(0, 1)
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


def measure_light(pictures: Tensor) -> Tensor:
    """Brightness, distance of the colours from grey, and change between neighbours (n, 3)."""
    grey = pictures.mean(1, keepdim=True)
    change = (grey[..., 1:] - grey[..., :-1]).abs().mean((1, 2, 3)) + (grey[..., 1:, :] - grey[..., :-1, :]).abs().mean(
        (1, 2, 3)
    )
    return torch.stack([grey.mean((1, 2, 3)), (pictures - grey).abs().mean((1, 2, 3)), change], 1)


INK = Attributes(
    measure_ink,
    {
        "stroke": (("thick", "bold", "heavy"), ("thin", "fine", "light")),
        "slant": (("slanted right", "leaning right"), ("slanted left", "leaning left")),
        "width": (("wide", "broad"), ("narrow", "slim")),
    },
    channels=1,
)
LIGHT = Attributes(
    measure_light,
    {
        "brightness": (("bright", "light"), ("dark", "dim")),
        "colour": (("colourful", "vivid"), ("grey", "pale")),
        "detail": (("busy", "detailed"), ("smooth", "plain")),
    },
    channels=3,
)
