"""Texts to read: statements about names, passages of them, and questions. Nothing in them can be guessed.

A statement says what a property of a name is, "home mira tino .", the home of mira is tino; a question is its
beginning, "? home mira", and its answer is what was said last: a fifth of the statements say something anew. A part of
the names is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

_SYLLABLES = [first + second for first, second in product("bdfgklmnprst", "aeio")]
#: Of two syllables each.
NAMES = sorted(Random(0).sample([first + second for first, second in product(_SYLLABLES, _SYLLABLES)], 256))
PROPERTIES = ["home", "friend", "food", "colour", "trade", "tool", "tree", "song"]
PAD, ASK, STOP = "<pad>", "?", "."
WORDS = [PAD, ASK, STOP, *PROPERTIES, *NAMES]
IDS = {word: number for number, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Statement:
    """What is said of a name: a property and its value."""

    property: str
    name: str
    value: str

    @property
    def ids(self) -> list[int]:
        """ "home mira tino ." """
        return encode([self.property, self.name, self.value, STOP])

    @property
    def question(self) -> list[int]:
        """ "? home mira" """
        return encode([ASK, self.property, self.name])

    @property
    def answer(self) -> int:
        """ "tino" """
        return IDS[self.value]


@dataclass(frozen=True)
class Reading:
    """Passages in their order, and questions about what holds after all of them."""

    passages: list[list[Statement]]
    asked: list[Statement]

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of each passage."""
        return [[token for one in passage for token in one.ids] for passage in self.passages]


def names(held_out: bool, share: float = 0.2) -> list[str]:
    """All names that are held out, or all others."""
    every = Random(1).sample(NAMES, len(NAMES))
    count = round(share * len(every))
    return every[:count] if held_out else every[count:]


def draw(
    random: Random,
    known: Sequence[str],
    passages: int,
    statements: int,
    ask: int,
    again: float = 0.2,
    properties: int = len(PROPERTIES),
) -> Reading:
    """Passages about some names, and questions about some of what they say.

    Args:
        random: draws them.
        known: the names.
        passages: how many.
        statements: of each.
        ask: questions, at most as many as there are answers.
        again: share of statements that say anew what was said before.
        properties: how many there are.
    """
    total = passages * statements
    about = random.sample(known, min(len(known), max(2, total // min(3, properties))))
    said: dict[tuple[str, str], Statement] = {}
    made: list[Statement] = []
    while len(made) < total:
        anew = bool(said) and random.random() < again
        key = random.choice(list(said)) if anew else (random.choice(PROPERTIES[:properties]), random.choice(about))
        if key in said and not anew and len(said) < len(about) * properties:
            continue
        said[key] = Statement(*key, random.choice(NAMES))
        made.append(said[key])
    parts = [made[start : start + statements] for start in range(0, total, statements)]
    return Reading(parts, random.sample(list(said.values()), min(ask, len(said))))


def questions(reading: Reading) -> tuple[list[int], list[int]]:
    """The questions of a request one after the other with their answers, and labels of the answers alone."""
    ids: list[int] = []
    labels: list[int] = []
    for one in reading.asked:
        ids += [*one.question, one.answer, IDS[STOP]]
        labels += [-100] * len(one.question) + [one.answer, -100]
    return ids, labels


def encode(words: Sequence[str]) -> list[int]:
    """The ids of words."""
    return [IDS[word] for word in words]


def decode(ids: Sequence[int]) -> str:
    """The words of ids."""
    return " ".join(WORDS[one] for one in ids)
