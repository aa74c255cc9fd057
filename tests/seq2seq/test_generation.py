"""Greedy and beam search over a model that is a table: beams as many as texts find the best text there is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mmattn.seq2seq.generation import beam_search, greedy

V, END, LONGEST = 5, 4, 4


def table(rows: int) -> Tensor:
    """Random logits after each text of up to `LONGEST` tokens, by row: what a text's number in base V points at."""
    return torch.randn(rows, V ** (LONGEST + 1), V, dtype=torch.float64) * 2


def step_of(logits: Tensor, origin: list[int]):
    """A step over the table; `origin` says to which row of the table each row of the step belongs."""

    def step(tokens: Tensor) -> Tensor:
        places = [sum((int(id) + 1) * V**i for i, id in enumerate(row[1:])) % logits.shape[1] for row in tokens]
        return torch.stack([logits[row, place] for row, place in zip(origin, places, strict=True)])

    return step


def best(logits: Tensor, row: int, penalty: float) -> list[int]:
    """The best finished text, by trying all."""
    found = {}
    for length in range(LONGEST):
        for text in itertools.product(range(V - 1), repeat=length):
            total = 0.0
            for count, id in enumerate([*text, END]):
                scores = step_of(logits, [row])(torch.tensor([[0, *text[:count]]]))[0].log_softmax(-1)
                total += float(scores[id])
            found[text] = total / (length + 1) ** penalty
    return list(max(found, key=lambda text: found[text]))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_enough_beams_find_the_best_text(penalty: float) -> None:
    logits = table(3)
    beams = V ** (LONGEST - 1)
    origin = [0, 1, 2]

    def reorder(rows) -> None:
        origin[:] = [origin[row] for row in rows]

    def step(tokens: Tensor) -> Tensor:
        return step_of(logits, origin)(tokens)

    given = {"end": END, "max_length": LONGEST, "beams": beams, "length_penalty": penalty}
    made = beam_search(step, reorder, torch.zeros(3, 1, dtype=torch.long), **given)
    assert made == [best(logits, row, penalty) for row in range(3)]


def test_greedy_takes_the_most_probable_token_and_stops_at_the_end() -> None:
    logits = table(2)
    made = greedy(step_of(logits, [0, 1]), torch.zeros(2, 1, dtype=torch.long), end=END, max_length=LONGEST)
    for row, text in enumerate(made):
        for count in range(len(text) + (len(text) < LONGEST)):
            scores = step_of(logits, [row])(torch.tensor([[0, *text[:count]]]))[0]
            assert int(scores.argmax()) == [*text, END][count]


def test_a_text_that_never_ends_is_cut_and_a_prefix_kept() -> None:
    def step(tokens: Tensor) -> Tensor:
        return torch.tensor([[0.0, 5.0, 1.0, 2.0, -9.0]]).repeat(len(tokens), 1)

    begin = torch.tensor([[0, 2], [0, 3]])
    for made in (
        greedy(step, begin, end=END, max_length=3),
        beam_search(step, lambda rows: None, begin, end=END, max_length=3, beams=2),
    ):
        assert made == [[2, 1, 1], [3, 1, 1]]
