"""Keys with values, and expressions of them: what is asked, and what is right.

A text is a list of tokens: "<", ">", an operator, a letter, or a whole number (as in tokenizers that keep up to three
digits together). A key is three letters, and to be asked for a value it stands in brackets.

    <kqz>+<abt>:    substitution    7+12
    <7>+<12>=       arithmetic      19
    <kqz>+<abt>=    KV-arithmetic   19

Where two models know keys, each its own, those of the second stand in other brackets: <kqz>+[abt]=
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from string import ascii_lowercase

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PAD, END = "[pad]", "[end]"
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
TASKS = ("substitution", "arithmetic", "KV-arithmetic")
BRACKETS = ("<>", "[]")
Pair = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Expression:
    """Two keys, their values and an operator; with `working` an answer begins with the numbers.

    `brackets` are the numbers of those around each key.
    """

    keys: tuple[str, str]
    values: tuple[int, int]
    operator: str
    working: bool = True
    brackets: tuple[int, int] = (0, 0)

    @property
    def result(self) -> int:
        """What comes out."""
        return OPERATORS[self.operator](*self.values)

    def over(self, names: Sequence[str] | None = None) -> list[str]:
        """The expression in brackets, of its keys, or of its values with any letters before them as `names`."""
        if names is None:
            inner = [list(key) for key in self.keys]
        else:
            inner = [[*name, str(value)] for name, value in zip(names, self.values, strict=True)]
        (a, b), (c, d) = (BRACKETS[number] for number in self.brackets)
        return [a, *inner[0], b, self.operator, c, *inner[1], d]

    def pair(self, task: str, names: Sequence[str] = ("", "")) -> Pair:
        """What is asked and what is right, for one of `TASKS`."""
        numbers = [str(self.values[0]), self.operator, str(self.values[1])]
        if task == "substitution":
            return [*self.over(), ":"], numbers
        result = [*(["-"] if self.result < 0 else []), str(abs(self.result))]
        asked = self.over(None if task == "KV-arithmetic" else names)
        return [*asked, "="], [*numbers, "=", *result] if self.working else result


class World:
    """Keys and their values, drawn at random, and the vocabulary of all texts about them.

    Args:
        count: of the keys. values: numbers from 0 to one less. share: of the keys that compositions are trained on.
        working: answers begin with the numbers. device: of batches. knowers: models among which the keys are dealt out.
    """

    def __init__(
        self, count: int, values: int, share: float, working: bool, seed: int, device: torch.device | str = "cpu",
        knowers: int = 1,
    ) -> None:  # fmt: skip
        self.device = torch.device(device)
        random = Random(seed)
        names = [a + b + c for a in ascii_lowercase for b in ascii_lowercase for c in ascii_lowercase]
        self.values = {key: random.randrange(values) for key in random.sample(names, count)}
        self.numbers, self.working = values, working
        keys = list(self.values)
        first = round(share * count)
        self.known = [keys[place::knowers] for place in range(knowers)]
        # Of each model, those to train on and the others.
        self.keys, self.held = (
            [part[place::knowers] for place in range(knowers)] for part in (keys[:first], keys[first:])
        )
        numbers = map(str, range(max(values * values, 2 * values)))
        more = [bracket for pair in BRACKETS[1:knowers] for bracket in pair]
        self.tokens = [PAD, END, *BRACKETS[0], ":", "=", *OPERATORS, *ascii_lowercase, *numbers, *more]
        self.ids = {token: id for id, token in enumerate(self.tokens)}

    def draw(self, keys: Sequence[Sequence[str]], random: Random) -> Expression:
        """An expression of a key that the first model knows and one that the last knows, of the keys of each."""
        first, second = random.choice(keys[0]), random.choice(keys[-1])
        values = (self.values[first], self.values[second])
        return Expression((first, second), values, random.choice([*OPERATORS]), self.working, (0, len(keys) - 1))

    def knowing(self, random: Random, done: float = 1.0, known: bool = True, knower: int = 0) -> Pair:
        """What m_A learns: the value of a key that it has just read, or both values of an expression, after : and =.

        Args:
            done: share of the training. A tenth of the keys come first and all after a third of it: with all from the
                start it may take thousands of steps to begin to tell keys apart.
            known: False gives a text of the same form in which the values are drawn anew each time: nothing to know.
            knower: number of the model, which has keys and brackets of its own.
        """
        keys = self.known[knower]
        made = self.draw([keys[: round((0.1 + 2.7 * done) * len(keys))]], random)
        made = replace(made, brackets=(knower, knower))
        if not known:
            values = (random.randrange(self.numbers), random.randrange(self.numbers))
            made = replace(made, values=values)
        if random.random() < 0.6:
            return made.over()[:5], [str(made.values[0])]
        (*asked, _), right = made.pair("substitution")
        return [*asked, random.choice(":=")], right

    def reckoning(self, random: Random) -> Pair:
        """What m_B learns: arithmetic, with up to four letters that mean nothing before each number.

        In 40 % the numbers stand in the working alone: m_B is to reckon with what it wrote and not with what it read.
        """
        values = (random.randrange(self.numbers), random.randrange(self.numbers))
        names = ["".join(random.choices(ascii_lowercase, k=random.randint(0, 4))) for _ in values]
        brackets = (0, len(self.known) - 1)
        made = Expression(("", ""), values, random.choice([*OPERATORS]), self.working, brackets)
        asked, right = made.pair("arithmetic", names)
        if self.working and random.random() < 0.4:
            asked, right = [token for token in asked if not token.isdigit()] + right[:4], right[4:]
        return asked, right

    def asked(self, task: str, count: int, seed: int) -> list[Expression]:
        """Expressions of held-out keys to be measured with."""
        random = Random(f"{seed} {task}")
        return [self.draw(self.held, random) for _ in range(count)]

    def batch(self, texts: Sequence[Sequence[Pair]]) -> dict[str, Tensor]:
        """Rows of one or more pairs each, that learn what is right in all of them, and end."""
        pad = self.ids[PAD]
        rows: list[Tensor] = []
        for text in texts:
            learned = [(token, right) for pair in text for right, part in enumerate(pair) for token in part]
            rows.append(torch.tensor([(self.ids[token], right) for token, right in (*learned, (END, 1))]))
        ids, right = pad_sequence(rows, batch_first=True, padding_value=-1).to(self.device).unbind(-1)
        mask = ids >= 0
        ids = ids.masked_fill(~mask, pad)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(right != 1, -100)}

    def prompts(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """What is asked, to be gone on with: padded on the left."""
        rows = [[self.ids[token] for token in asked] for asked, _ in pairs]
        longest = max(map(len, rows))
        ids = torch.tensor([[self.ids[PAD]] * (longest - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.device)
        return {"input_ids": ids, "attention_mask": mask}

    def said(self, ids: Sequence[int]) -> list[str]:
        """The tokens up to the end."""
        tokens = [self.tokens[id] for id in ids]
        return tokens[: tokens.index(END)] if END in tokens else tokens
