"""Keys with values, and expressions of them as prompts with their right answers.

A text is a list of tokens: "<", ">", an operator, a letter, or a whole number (as in tokenizers that keep up to three
digits together). A key is three letters in brackets.

    <kqz>+<abt>:    substitution    7+12
    <7>+<12>=       arithmetic      19
    <kqz>+<abt>=    KV-arithmetic   19

Where two models know keys, each its own, those of the second stand in other brackets: <kqz>+[abt]=

A pretrained anchor has tokens of its own for the same texts, one for each digit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.errors import ConfigError

from .settings import DataSettings

PAD, END = "[pad]", "[end]"
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
TASKS = ("substitution", "arithmetic", "KV-arithmetic")
BRACKETS = ("<>", "[]")
Pair = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Expression:
    """Two keys with the numbers of their brackets, their values and an operator; `working`: answers begin with both."""

    keys: tuple[str, str]
    values: tuple[int, int]
    operator: str
    working: bool = True
    brackets: tuple[int, int] = (0, 0)

    def text(self, names: Sequence[str] | None = None) -> list[str]:
        """Return the expression of its keys, or of its values with the letters of `names` before them."""
        inner = [list(key) for key in self.keys]
        if names is not None:
            inner = [[*name, str(value)] for name, value in zip(names, self.values, strict=True)]
        (a, b), (c, d) = (BRACKETS[number] for number in self.brackets)
        return [a, *inner[0], b, self.operator, c, *inner[1], d]

    def pair(self, task: str, names: Sequence[str] = ("", "")) -> Pair:
        """Return the prompt and the right answer, for one of `TASKS`."""
        numbers = [str(self.values[0]), self.operator, str(self.values[1])]
        if task == "substitution":
            return [*self.text(), ":"], numbers
        value = OPERATORS[self.operator](*self.values)
        result = [*(["-"] if value < 0 else []), str(abs(value))]
        prompt = [*self.text(None if task == "KV-arithmetic" else names), "="]
        return prompt, [*numbers, "=", *result] if self.working else result


class World:
    """Keys with random values, the models that know them, and the vocabulary of all texts about them.

    With the tokenizer of a pretrained model, texts have its tokens and follow this many examples of arithmetic
    (`shots`).
    """

    def __init__(
        self,
        settings: DataSettings,
        seed: int,
        device: torch.device | str = "cpu",
        tokenizer: Any = None,
        shots: int = 0,
    ) -> None:
        self.device = torch.device(device)
        random, key_models = Random(seed), settings.key_models
        names = [a + b + c for a in ascii_lowercase for b in ascii_lowercase for c in ascii_lowercase]
        self.values = {key: random.randrange(settings.values) for key in random.sample(names, settings.keys)}
        self.numbers, self.working = settings.values, settings.working
        keys = list(self.values)
        first = round(settings.share * settings.keys)
        self.known = [keys[place::key_models] for place in range(key_models)]
        # Of each model, those to train on and the others.
        self.keys, self.held_out = (
            [part[place::key_models] for place in range(key_models)] for part in (keys[:first], keys[first:])
        )
        numbers = map(str, range(max(self.numbers**2, 2 * self.numbers)))
        more = [bracket for pair in BRACKETS[1:key_models] for bracket in pair]
        self.tokens = [PAD, END, *BRACKETS[0], ":", "=", *OPERATORS, *ascii_lowercase, *numbers, *more]
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        self.shots: list[str] = []
        if tokenizer is not None:
            if self.numbers > 10:
                raise ConfigError(f"values of a pretrained anchor are digits: give data.values=10, got {self.numbers}")
            self.ids = tokens_of(tokenizer, [token for token in self.tokens if not token[1:].isdigit()])
            for shot in range(shots):
                values = random.randrange(self.numbers), random.randrange(self.numbers)
                one = Expression(("", ""), values, [*OPERATORS][shot % 3], self.working)
                self.shots += [*itertools.chain(*one.pair("arithmetic")), END]
        self.words = {id: token for token, id in self.ids.items()}

    def spell(self, tokens: Sequence[str]) -> list[int]:
        """Return ids; a number without a token is spelled by its digits."""
        return [self.ids[part] for token in tokens for part in ([token] if token in self.ids else token)]

    def draw(self, keys: Sequence[Sequence[str]], random: Random) -> Expression:
        """Return an expression of a key of the first model and one of the last, of these keys of each."""
        first, second = random.choice(keys[0]), random.choice(keys[-1])
        values = (self.values[first], self.values[second])
        return Expression((first, second), values, random.choice([*OPERATORS]), self.working, (0, len(keys) - 1))

    def draw_key_text(self, random: Random, done: float = 1.0, known: bool = True, key_model: int = 0) -> Pair:
        """Return a text of m_A: the value of the key before it, or both values of an expression after : and =.

        `done` is the share of the training: it starts with a tenth of the keys and has all after a third, because with
        all from the start a model may need thousands of steps to tell keys apart. Without `known` each text has random
        values. `key_model` is the number of the model.
        """
        keys = self.known[key_model]
        one = self.draw([keys[: round((0.1 + 2.7 * done) * len(keys))]], random)
        one = replace(one, brackets=(key_model, key_model))
        if not known:
            one = replace(one, values=(random.randrange(self.numbers), random.randrange(self.numbers)))
        if random.random() < 0.6:
            return one.text()[:5], [str(one.values[0])]
        (*prompt, _), answer = one.pair("substitution")
        return [*prompt, random.choice(":=")], answer

    def draw_sum(self, random: Random) -> Pair:
        """Return a text of m_B: arithmetic, with up to four meaningless letters before each number.

        In 40 % only the working has the numbers, so m_B must calculate with the numbers that it wrote, not read.
        """
        values = (random.randrange(self.numbers), random.randrange(self.numbers))
        names = ["".join(random.choices(ascii_lowercase, k=random.randint(0, 4))) for _ in values]
        one = Expression(("", ""), values, random.choice([*OPERATORS]), self.working, (0, len(self.known) - 1))
        prompt, answer = one.pair("arithmetic", names)
        if self.working and random.random() < 0.4:
            return [token for token in prompt if not token.isdigit()] + answer[:4], answer[4:]
        return prompt, answer

    def expressions(self, task: str, count: int, seed: int) -> list[Expression]:
        """Return expressions of held-out keys to measure with."""
        random = Random(f"{seed} {task}")
        return [self.draw(self.held_out, random) for _ in range(count)]

    def batch(self, texts: Sequence[Sequence[Pair]]) -> dict[str, Tensor]:
        """Return rows of one or more pairs each, with labels on the answers and on the end."""
        rows: list[Tensor] = []
        for text in texts:
            parts = [(self.shots, 0), *((part, label) for pair in text for label, part in enumerate(pair)), ([END], 1)]
            rows.append(torch.tensor([(id, label) for part, label in parts for id in self.spell(part)]))
        ids, labels = pad_sequence(rows, batch_first=True, padding_value=-1).to(self.device).unbind(-1)
        mask = ids >= 0
        ids = ids.masked_fill(~mask, self.ids[PAD])
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(labels != 1, -100)}

    def prompts(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """Return the prompts, padded on the left for generation."""
        rows = [torch.tensor(self.spell([*self.shots, *prompt])) for prompt, _ in pairs]
        ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(self.device)
        return {"input_ids": ids.masked_fill(ids < 0, self.ids[PAD]), "attention_mask": (ids >= 0).long()}

    def answer(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens up to the end; tokens of no text become ?."""
        tokens = [self.words.get(id, "?") for id in ids]
        return tokens[: tokens.index(END)] if END in tokens else tokens


def tokens_of(tokenizer: Any, tokens: Sequence[str]) -> dict[str, int]:
    """Return the id that a tokenizer has for each of these tokens; a line ends a text."""
    texts = [{PAD: tokenizer.pad_token, END: "\n"}.get(token, token) for token in tokens]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if several := [text for text, one in zip(texts, ids, strict=True) if len(one) != 1]:
        raise ConfigError(f"each sign must be one token, and {several} are not: take another anchor")
    return {token: id for token, (id,) in zip(tokens, ids, strict=True)}
