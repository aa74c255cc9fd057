"""Texts to read: statements about names, passages of statements, and questions whose answers cannot be guessed.

A statement has a property, a name and a value: "home mira tino.", the home of mira is tino. A question is its
beginning, "? home mira", and its answer the value of the last such statement: a fifth of the statements change an
earlier one. A part of the names is held out. Every word is one token of the language model, so that passages are of
equal length and an answer is right or wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mmattn.errors import ConfigError

#: Of these the first that are tokens.
PROPERTIES = (
    "home", "friend", "food", "colour", "trade", "tool", "tree", "song",
    "book", "city", "color", "hand", "music", "place", "road", "work",
)  # fmt: skip
ASK, STOP = "?", "."
KINDS = 8  # of properties
FEWEST_NAMES, MOST_NAMES = 64, 256


@dataclass(frozen=True)
class Statement:
    """A property of a name and its value."""

    property: str
    name: str
    value: str


@dataclass(frozen=True)
class Reading:
    """Passages in their order, and statements that hold after all of them, to ask for."""

    passages: list[list[Statement]]
    asked: list[Statement]


class World:
    """Words of one token each, and texts of these words."""

    def __init__(self, tokenizer: Any) -> None:
        every = [text.strip() for text in tokenizer.batch_decode([[token] for token in range(len(tokenizer))])]
        words = sorted({text for text in every if re.fullmatch("[a-z]{4,8}", text)} - {*PROPERTIES})
        self.ids = _single_tokens(tokenizer, [ASK, *PROPERTIES, *words])
        names = [word for word in words if word in self.ids]
        self.properties = [word for word in PROPERTIES if word in self.ids][:KINDS]
        if len(names) < FEWEST_NAMES or len(self.properties) < KINDS or not {ASK, STOP} <= {*self.ids}:
            raise ConfigError(
                f"words must be one token: this tokenizer has {len(names)} of {FEWEST_NAMES} names, "
                f"{len(self.properties)} of {KINDS} properties, {'?' if ASK in self.ids else 'no ?'} and "
                f"{'.' if STOP in self.ids else 'no .'}; take another language model"
            )
        self.names = sorted(Random(0).sample(names, min(MOST_NAMES, len(names))))

    def some_names(self, held_out: bool, share: float = 0.2) -> list[str]:
        """Return the held-out names, or the training names."""
        every = Random(1).sample(self.names, len(self.names))
        count = round(share * len(every))
        return every[:count] if held_out else every[count:]

    def draw(
        self,
        random: Random,
        names: Sequence[str],
        passages: int,
        statements: int,
        ask: int,
        again: float = 0.2,
        properties: int = KINDS,
    ) -> Reading:
        """Draw passages about some names, and questions about them."""
        total = passages * statements
        about = random.sample(names, min(len(names), max(2, total // min(3, properties))))
        said: dict[tuple[str, str], Statement] = {}
        drawn: list[Statement] = []
        while len(drawn) < total:
            anew = bool(said) and random.random() < again
            if anew:
                key = random.choice(list(said))
            else:
                key = random.choice(self.properties[:properties]), random.choice(about)
            if key in said and not anew and len(said) < len(about) * properties:
                continue
            said[key] = Statement(*key, random.choice(self.names))
            drawn.append(said[key])
        parts = [drawn[start : start + statements] for start in range(0, total, statements)]
        return Reading(parts, random.sample(list(said.values()), min(ask, len(said))))

    def passages(self, reading: Reading) -> list[list[int]]:
        """Return the tokens of each passage: "home mira tino. friend mira bako." """
        return [
            [token for one in passage for token in self.encode([one.property, one.name, one.value, STOP])]
            for passage in reading.passages
        ]

    def questions(self, asked: Sequence[Statement]) -> tuple[list[int], list[int]]:
        """Return questions with their answers, "? home mira tino.", and labels of the answers alone."""
        ids: list[int] = []
        labels: list[int] = []
        for one in asked:
            answer = self.ids[one.value]
            ids += [*self.encode([ASK, one.property, one.name]), answer, self.ids[STOP]]
            labels += [-100, -100, -100, answer, -100]
        return ids, labels

    def encode(self, words: Sequence[str]) -> list[int]:
        """Return the token of each word."""
        return [self.ids[word] for word in words]


def _single_tokens(tokenizer: Any, words: Sequence[str]) -> dict[str, int]:
    """Return the token of "." at the end of a word, and of each word that is one token after it."""
    word = PROPERTIES[0]
    texts = [word, word + STOP, STOP, *(f"{STOP} {one}" for one in words)]
    begun, ended, stop, *after = tokenizer(texts, add_special_tokens=False)["input_ids"]
    candidates = [(STOP, begun, ended), *((one, stop, ids) for one, ids in zip(words, after, strict=True))]
    return {one: ids[-1] for one, before, ids in candidates if ids[:-1] == before and ids[-1] != tokenizer.unk_token_id}
