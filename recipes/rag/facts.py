"""Real facts from Babel's copy of the Unicode CLDR: what territories are called in about 140 languages, and of each its
English name, currency and language.

The key of a fact is a name as one language writes it ("Allemagne"), so that one answer ("Germany", "Euro", "German")
belongs to many keys. Names that mean different territories in different languages are left out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

# For each property: how a fact is filed, how it is asked for, how it is told.
PROPERTIES = {
    "name": ("English name of {key}", "What is the English name of {key}?", "{key} is called {value} in English."),
    "currency": ("currency of {key}", "What is the currency of {key}?", "The currency of {key} is {value}."),
    "language": ("language of {key}", "What language is spoken in {key}?", "The language of {key} is {value}."),
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fact:
    """One fact: the property of a key has a value; `language` is the one the key is written in."""

    key: str
    property: str
    value: str
    language: str

    @property
    def title(self) -> str:
        """What the fact is filed under: "currency of Allemagne"."""
        return PROPERTIES[self.property][0].format(key=self.key)

    @property
    def question(self) -> str:
        """ "What is the currency of Allemagne?" """
        return PROPERTIES[self.property][1].format(key=self.key)

    @property
    def sentence(self) -> str:
        """ "The currency of Allemagne is Euro." """
        return PROPERTIES[self.property][2].format(key=self.key, value=self.value)


def prompt(fact: Fact, told: Iterable[Fact] = ()) -> str:
    """A question after some facts, as the language model was trained to read them; its answer follows after a space."""
    return "".join(f"{one.sentence}\n" for one in told) + f"Question: {fact.question}\nAnswer:"


def load_facts(held_out: float = 0.2, seed: int = 0) -> tuple[list[Fact], list[Fact]]:
    """Facts to train on, and facts of keys that no fact to train on has.

    Languages are divided, so that what is held out are all names that a language has and no language of training.
    """
    from babel import Locale

    names: dict[str, dict[str, str]] = {}
    values = _values(Locale("en"))
    for language in _latin_languages(values):
        own = Locale(language).territories
        names[language] = {own[code]: code for code in values if code in own}
    meanings: dict[str, set[str]] = {}
    for own_names in names.values():
        for name, code in own_names.items():
            meanings.setdefault(name, set()).add(code)
    languages = sorted(names)
    Random(seed).shuffle(languages)
    kept = languages[round(held_out * len(languages)) :]
    known = {name for language in kept for name in names[language]}
    parts: tuple[list[Fact], list[Fact]] = ([], [])
    told: set[str] = set()
    for language in sorted(names, key=lambda one: (one not in kept, one)):
        for name, code in sorted(names[language].items()):
            if len(meanings[name]) > 1 or name in told:
                continue
            told.add(name)
            facts = [Fact(name, what, value, language) for what, value in values[code].items() if value != name]
            parts[0 if name in known else 1].extend(facts)
    return parts


def made_up(facts: Iterable[Fact], count: int, seed: int = 0) -> list[Fact]:
    """Facts about names that nobody has, by rule: near misses of real ones.

    Half the names are real ones with one letter changed, added, left out, or exchanged with the next; the others are
    the beginning of one real name and the end of another. Properties and values are drawn from the real facts.

    Args:
        facts: whose names and values they are made of.
        count: how many.
        seed: of the random numbers.
    """
    random, facts = Random(seed), list(facts)
    names = sorted({fact.key for fact in facts})
    letters = sorted({letter for name in names for letter in name if letter.isalpha()})
    told = {(fact.key, fact.property) for fact in facts}
    real, made = set(names), []
    while len(made) < count:
        name = _misspelled(random.choice(names), letters, random)
        if len(made) % 2:
            first, second = random.choice(names), random.choice(names)
            name = first[: max(1, random.randrange(len(first) + 1))] + second[random.randrange(len(second)) :]
        like = random.choice(facts)
        if name.strip() != name or name in real or (name, like.property) in told:
            continue
        told.add((name, like.property))
        made.append(Fact(name, like.property, like.value, like.language))
    return made


def _misspelled(name: str, letters: list[str], random: Random) -> str:
    """A name with one letter changed, added, left out, or exchanged with the next."""
    place, how = random.randrange(len(name)), random.randrange(4)
    before, after = name[:place], name[place + 1 :]
    if how < 2:
        return before + random.choice(letters) + (after if how else name[place:])
    return before + after[:1] + name[place] + after[1:] if how == 2 else before + after


def answers(facts: Iterable[Fact]) -> list[str]:
    """Every value once, in order."""
    return sorted({fact.value for fact in facts})


def _values(english: object) -> dict[str, dict[str, str]]:
    """For each territory {property: value}, in English."""
    from babel.languages import get_official_languages
    from babel.numbers import get_territory_currencies

    out = {}
    for code, name in sorted(english.territories.items()):  # type: ignore[attr-defined]
        # Two letters are countries and dependencies; three of those are not places.
        if len(code) != 2 or not code.isalpha() or code in {"ZZ", "XA", "XB", "EU", "EZ", "UN", "QO"}:
            continue
        currencies, languages = get_territory_currencies(code), get_official_languages(code)
        found = {"name": name}
        if currencies and currencies[0] in english.currencies:  # type: ignore[attr-defined]
            found["currency"] = english.currencies[currencies[0]]  # type: ignore[attr-defined]
        if languages and languages[0] in english.languages:  # type: ignore[attr-defined]
            found["language"] = english.languages[languages[0]]  # type: ignore[attr-defined]
        out[code] = found
    return out


def _latin_languages(codes: Iterable[str]) -> list[str]:
    """Languages that write nearly all of these territories in Latin letters."""
    from babel import Locale, localedata

    codes, found = list(codes), []
    for language in sorted(name for name in localedata.locale_identifiers() if "_" not in name):
        own = Locale(language).territories
        names = [own[code] for code in codes if code in own]
        latin = sum(all("LATIN" in unicodedata.name(c, "") for c in name if c.isalpha()) for name in names)
        if len(names) > 0.8 * len(codes) and latin > 0.95 * len(names):
            found.append(language)
    return found
