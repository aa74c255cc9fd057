"""Facts from Babel's copy of the Unicode CLDR: names of territories in 140 languages, their currencies and languages.

The key of a fact is a name as one language writes it ("Allemagne"), so that one answer ("Germany", "Euro", "German")
belongs to many keys. Names that mean different territories in different languages are left out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from babel import Locale

# For each property the title of a fact, its question and its sentence.
PROPERTIES = {
    "name": ("English name of {key}", "What is the English name of {key}?", "{key} is called {value} in English."),
    "currency": ("currency of {key}", "What is the currency of {key}?", "The currency of {key} is {value}."),
    "language": ("language of {key}", "What language is spoken in {key}?", "The language of {key} is {value}."),
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fact:
    """One fact: the property of a key has a value; the key is written in a language."""

    key: str
    property: str
    value: str
    language: str

    @property
    def title(self) -> str:
        """Return the title of the entry: "currency of Allemagne"."""
        return PROPERTIES[self.property][0].format(key=self.key)

    @property
    def question(self) -> str:
        """Return the question: "What is the currency of Allemagne?"."""
        return PROPERTIES[self.property][1].format(key=self.key)

    @property
    def sentence(self) -> str:
        """Return the fact in words: "The currency of Allemagne is Euro."."""
        return PROPERTIES[self.property][2].format(key=self.key, value=self.value)


def prompt(fact: Fact, context: Iterable[Fact] = ()) -> str:
    """Return a question after some facts; its answer follows after a space."""
    return "".join(f"{one.sentence}\n" for one in context) + f"Question: {fact.question}\nAnswer:"


def load_facts(held_out: float = 0.2, seed: int = 0) -> tuple[list[Fact], list[Fact]]:
    """Return facts to train on, and facts of keys that no fact to train on has.

    Languages are divided: held out are all names that one of them has and no language of training.
    """
    from babel import Locale

    values = territory_values(Locale("en"))
    names: dict[str, dict[str, str]] = {}
    meanings: dict[str, set[str]] = {}
    for language in latin_languages(values):
        territories = Locale(language).territories
        names[language] = {territories[code]: code for code in values if code in territories}
        for name, code in names[language].items():
            meanings.setdefault(name, set()).add(code)
    languages = sorted(names)
    Random(seed).shuffle(languages)
    train = languages[round(held_out * len(languages)) :]
    train_names = {name for language in train for name in names[language]}
    parts: tuple[list[Fact], list[Fact]] = ([], [])
    done: set[str] = set()
    for language in sorted(names, key=lambda one: (one not in train, one)):
        for name, code in sorted(names[language].items()):
            if len(meanings[name]) > 1 or name in done:
                continue
            done.add(name)
            facts = [Fact(name, what, value, language) for what, value in values[code].items() if value != name]
            parts[0 if name in train_names else 1].extend(facts)
    return parts


def synthetic(facts: Iterable[Fact], count: int, seed: int = 0) -> list[Fact]:
    """Return facts about near misses of the names of `facts`, with their properties and values.

    Half the names have one letter changed, added, left out, or exchanged with the next; the others are the beginning
    of one real name and the end of another.
    """
    random, facts = Random(seed), list(facts)
    names = sorted({fact.key for fact in facts})
    letters = sorted({letter for name in names for letter in name if letter.isalpha()})
    done = {(fact.key, fact.property) for fact in facts}
    real, new = set(names), list[Fact]()
    while len(new) < count:
        name = misspell(random.choice(names), letters, random)
        if len(new) % 2:
            first, second = random.choice(names), random.choice(names)
            name = first[: max(1, random.randrange(len(first) + 1))] + second[random.randrange(len(second)) :]
        like = random.choice(facts)
        if name.strip() != name or name in real or (name, like.property) in done:
            continue
        done.add((name, like.property))
        new.append(Fact(name, like.property, like.value, like.language))
    return new


def misspell(name: str, letters: list[str], random: Random) -> str:
    """Return a name with one letter changed, added, left out, or exchanged with the next."""
    place, how = random.randrange(len(name)), random.randrange(4)
    before, after = name[:place], name[place + 1 :]
    if how < 2:
        return before + random.choice(letters) + (after if how else name[place:])
    return before + after[:1] + name[place] + after[1:] if how == 2 else before + after


def territory_values(english: Locale) -> dict[str, dict[str, str]]:
    """Return for each territory {property: value}, in English."""
    from babel.languages import get_official_languages
    from babel.numbers import get_territory_currencies

    values = {}
    for code, name in sorted(english.territories.items()):
        # Two letters are countries and dependencies; some of those are not places.
        if len(code) != 2 or not code.isalpha() or code in {"ZZ", "XA", "XB", "EU", "EZ", "UN", "QO"}:
            continue
        values[code] = {"name": name}
        for what, codes, words in (
            ("currency", get_territory_currencies(code), english.currencies),
            ("language", get_official_languages(code), english.languages),
        ):
            if codes and codes[0] in words:
                values[code][what] = words[codes[0]]
    return values


def latin_languages(codes: Iterable[str]) -> list[str]:
    """Return the languages that write nearly all of these territories in Latin letters."""
    from babel import Locale, localedata

    codes, languages = list(codes), []
    for language in sorted(name for name in localedata.locale_identifiers() if "_" not in name):
        territories = Locale(language).territories
        names = [territories[code] for code in codes if code in territories]
        latin = sum(all("LATIN" in unicodedata.name(c, "") for c in name if c.isalpha()) for name in names)
        if len(names) > 0.8 * len(codes) and latin > 0.95 * len(names):
            languages.append(language)
    return languages
