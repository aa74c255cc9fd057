"""Sentences and their translations: read from a file, and divided so that what is measured was never seen."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mmattn.errors import ConfigError

from .dates import write_pairs
from .settings import DataSettings


@dataclass(frozen=True)
class Pair:
    source: str
    target: str


@dataclass(frozen=True)
class Question:
    """A held-out source, and all translations of it that there are."""

    source: str
    references: tuple[str, ...]


def load_pairs(settings: DataSettings, seed: int) -> tuple[list[Pair], list[Question]]:
    """Pairs to train on, and held-out questions.

    Raises:
        ConfigError: the file is not there, or a line of it is no pair; fewer sources than are to be held out.
    """
    if settings.pairs is None:
        pairs = [Pair(*one) for one in write_pairs(settings.written, settings.languages, seed)]
    else:
        pairs = read_pairs(Path(settings.pairs))
    return divide(pairs, settings.held_out, seed)


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file, each once: a source, a tab, its translation; what stands after a second tab is left out.

    Raises:
        ConfigError: no such file, not UTF-8, or a line without a source or a translation, which is named.
    """
    if not path.is_file():
        raise ConfigError(f"data.pairs: there is no file {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    pairs = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = [" ".join(unicodedata.normalize("NFC", part).split()) for part in line.split("\t")[:2]]
        if len(parts) < 2 or not all(parts):
            raise ConfigError(f"{path}, line {number}: a source, a tab and its translation expected, got {line!r:.60}")
        pairs[Pair(*parts)] = True
    return list(pairs)


def divide(pairs: list[Pair], held_out: int, seed: int) -> tuple[list[Pair], list[Question]]:
    """Hold out so many sources with all their translations.

    Neither a held-out source nor any of its translations stands in training, whatever their case and punctuation: pairs
    that have one of them are left out of both parts.

    Raises:
        ConfigError: nothing would be left to train on.
    """
    sources: dict[str, list[Pair]] = {}
    for pair in pairs:
        sources.setdefault(plain(pair.source), []).append(pair)
    order = sorted(sources)
    Random(seed).shuffle(order)
    held = {name: sources[name] for name in order[:held_out]}
    told = {plain(pair.target) for own in held.values() for pair in own}
    train = [pair for pair in pairs if plain(pair.source) not in held and plain(pair.target) not in told]
    if not train:
        raise ConfigError(
            f"there are {len(sources)} different sources, of which data.held_out={held_out} leave nothing to train on: "
            "give more pairs, or hold out fewer"
        )
    questions: dict[str, dict[str, bool]] = {}
    for pair in (pair for own in held.values() for pair in own):
        questions.setdefault(pair.source, {})[pair.target] = True
    return train, [Question(source, tuple(references)) for source, references in questions.items()]


def plain(text: str) -> str:
    """A sentence without case, spaces and punctuation but that in numbers, or as it is where it has nothing else.

    >>> plain("It's 1.5 km, Tom!")
    'its1.5kmtom'
    """
    text = text.casefold()
    kept = [
        letter
        for before, letter, after in zip(f" {text}", text, f"{text[1:]} ", strict=False)
        if unicodedata.category(letter)[0] not in "PZ" or (before.isdigit() and after.isdigit())
    ]
    return "".join(kept) or text
