"""Orders and seeds that are functions of what they are for."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mmattn.errors import ConfigError, check_int


class PairSampler:
    """Pairs of an item and one of its texts, every item once an epoch.

    A function of seed and step alone: runs that differ in what they train see the same pairs, and a run resumed at a
    step goes on as if it had never stopped.

    Args:
        choices: for each item the texts that may go with it.
        batch_size: pairs per step.
        seed: of the order.

    Raises:
        ConfigError: no items, or one without texts.

    >>> order = PairSampler([[0], [1, 2], [1, 2]], batch_size=2, seed=7)
    >>> order.pairs(0) == PairSampler([[0], [1, 2], [1, 2]], batch_size=2, seed=7).pairs(0)
    True
    """

    def __init__(self, choices: Sequence[Sequence[int]], batch_size: int, seed: int = 0) -> None:
        if not choices or not all(len(texts) for texts in choices):
            raise ConfigError(f"every item needs at least one text; got {len(choices)} items, or one without")
        self.choices = [list(texts) for texts in choices]
        self.batch_size = check_int("batch_size", batch_size)
        self.seed = check_int("seed", seed, at_least=0)
        self._epoch: tuple[int, list[tuple[int, int]]] | None = None

    def pairs(self, step: int) -> list[tuple[int, int]]:
        """(item, text) of each row of the batch at `step`, counted from 0."""
        first = check_int("step", step, at_least=0) * self.batch_size
        return [self._pair(first + row) for row in range(self.batch_size)]

    def _pair(self, number: int) -> tuple[int, int]:
        epoch, place = divmod(number, len(self.choices))
        if self._epoch is None or self._epoch[0] != epoch:
            rng = random.Random(f"{self.seed}/{epoch}")
            items = list(range(len(self.choices)))
            rng.shuffle(items)
            self._epoch = (epoch, [(item, rng.choice(self.choices[item])) for item in items])
        return self._epoch[1][place]


def derive_seed(*parts: object) -> int:
    """A seed from what it is for: the same for the same parts, in every process.

    >>> derive_seed(0, "step", 3) == derive_seed(0, "step", 3), derive_seed(0, "step", 3) == derive_seed(0, "step", 4)
    (True, False)
    """
    return random.Random("/".join(map(str, parts))).getrandbits(63)
