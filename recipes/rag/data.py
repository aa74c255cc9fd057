"""Facts from Babel's copy of the Unicode CLDR (names of territories in 140 languages, their currencies and languages),
and entries of an index of them: one slot each, of the vectors of the fact's title and of its value.

The key of a fact is a name as one language writes it ("Allemagne"), so that one answer ("Germany", "Euro", "German")
belongs to many keys. Names that mean different territories in different languages are left out.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmattn
from mmattn.encoders import NameEncoder

if TYPE_CHECKING:
    from babel import Locale

# For each property the title of a fact, its question and its sentence.
PROPERTIES = {
    "name": ("English name of {key}", "What is the English name of {key}?", "{key} is called {value} in English."),
    "currency": ("currency of {key}", "What is the currency of {key}?", "The currency of {key} is {value}."),
    "language": ("language of {key}", "What language is spoken in {key}?", "The language of {key} is {value}."),
}
UNKNOWN = "unknown"
BLOCK = 1 << 14  # texts in a file of vectors


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
    """Return training facts, and held-out facts with other keys.

    Languages are split; all names of held-out languages that no training language has are held out.
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


def embed(encoder: NameEncoder, texts: Sequence[str], cache: Path, progress: bool = False) -> Tensor:
    """Return the vectors (n, e) of texts; each block of them is kept in a file named after encoder and texts."""
    blocks = []
    for start in range(0, len(texts), BLOCK):
        block = list(texts[start : start + BLOCK])
        name = hashlib.sha256("\n".join([encoder.fingerprint, *block]).encode()).hexdigest()[:24]
        file = cache / f"texts-{name}.safetensors"
        if not file.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            vectors = encoder.encode(block, batch_size=128, progress=progress).tokens[:, 0]
            save_file({"vectors": vectors.contiguous()}, file)
        blocks.append(load_file(file)["vectors"])
    return torch.cat(blocks)


@dataclass
class Entries:
    """Facts, vectors of their titles (n, e), distinct values and first q questions (q, e), and the encoder."""

    facts: list[Fact]
    titles: Tensor
    values: Tensor
    questions: Tensor
    encoder: NameEncoder | None = None

    def __post_init__(self) -> None:
        self.by_key: dict[str, list[int]] = {}  # the rows of each key
        for row, fact in enumerate(self.facts):
            self.by_key.setdefault(fact.key, []).append(row)
        place = {value: row for row, value in enumerate(distinct_values(self.facts))}
        self.value_rows = torch.tensor([place[fact.value] for fact in self.facts])

    @classmethod
    def of(
        cls, facts: list[Fact], questions: int, encoder: NameEncoder, cache: Path, progress: bool = False
    ) -> Entries:
        """Embed each text once; the first `questions` facts have questions."""
        return cls(
            facts,
            embed(encoder, [fact.title for fact in facts], cache, progress),
            embed(encoder, distinct_values(facts), cache),
            embed(encoder, [fact.question for fact in facts[:questions]], cache, progress),
            encoder,
        )

    def slots(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Return the slots (…, 2e) of some facts: the title's vector and the value's."""
        return torch.cat([self.titles[rows], self.values[self.value_rows[rows]]], -1)

    def queries(self, rows: Sequence[int]) -> Tensor:
        """Return queries (n, 2e) that compare questions with the titles of slots, and with nothing of their values."""
        return torch.nn.functional.pad(self.questions[rows], (0, self.values.shape[1]))

    def index(self, rows: Sequence[int]) -> mmattn.Index:
        """Return an index of some facts, searched by their titles; its ids are the rows."""
        rows = list(rows)
        texts, tokens = [self.facts[row].sentence for row in rows], mmattn.Memory(self.slots(rows)[:, None])
        return mmattn.Index.build(self.titles[rows], encoder=self.encoder, ids=rows, texts=texts, tokens=tokens)

    def index_of_slots(self, rows: Sequence[int], store: str = "exact", **settings: Any) -> mmattn.Index:
        """Return an index of slots, for `as_memory`; its ids are the rows."""
        rows = list(rows)
        return mmattn.Index.build(self.slots(rows), metric="ip", ids=rows, store=store, **settings)

    def nearest(self, rows: Sequence[int], questions: Sequence[int], count: int) -> mmattn.Memory:
        """Return a memory of the `count` facts among some whose titles are most like each question."""
        choice = torch.tensor(rows)
        best = [(self.titles @ self.questions[one])[choice].topk(min(count, len(rows))) for one in questions]
        places = torch.stack([choice[one.indices] for one in best])
        sources = [[{"id": row} for row in line] for line in places.tolist()]
        return mmattn.Memory(self.slots(places), scores=torch.stack([one.values for one in best]), sources=sources)


def distinct_values(facts: Sequence[Fact]) -> list[str]:
    """Return the values of facts, each once."""
    return sorted({fact.value for fact in facts})


@dataclass
class EntrySet:
    """Rows of the facts in an index, and of the facts to ask for; half of these are not in the index."""

    rows: list[int]
    questions: list[int]
    present: list[bool]


def entry_sets(entries: Entries, held_out: int, size: int, ask: int, seed: int) -> list[EntrySet]:
    """Return sets of `size` facts with `ask` questions in all.

    Questions are about the first `held_out` facts of `entries`, which fill the sets before the others do. A set also
    has the other facts about the key of a question, so finding the key is not enough.
    """
    random, sets = Random(seed * 1009 + size), list[EntrySet]()
    while ask > 0:
        questions = random.sample(range(held_out), min(ask, max(2, size // 5)))
        present = [number % 2 == 0 for number in range(len(questions))]
        rows = choose_rows(entries, held_out, size, questions, present, random)
        sets.append(EntrySet(rows, questions, present))
        ask -= len(questions)
    return sets


def choose_rows(
    entries: Entries, held_out: int, size: int, questions: list[int], present: list[bool], random: Random
) -> list[int]:
    """Return the rows of a set: the present answers, other facts of the same keys, then held-out facts and others."""
    rows = [row for row, here in zip(questions, present, strict=True) if here]
    absent = set(questions) - set(rows)
    same_key = dict.fromkeys(row for one in questions for row in entries.by_key[entries.facts[one].key])
    others = [row for row in same_key if row not in absent and row not in rows]
    rows += others[: max(0, size // 2 - len(rows))]
    used = {*rows, *absent}
    others = [row for row in range(len(entries.facts)) if row not in used]
    first = [row for row in others if row < held_out]
    fill = size - len(rows)
    rows += random.sample(first, min(fill, len(first)))
    return rows + random.sample([row for row in others if row >= held_out], max(0, fill - len(first)))
