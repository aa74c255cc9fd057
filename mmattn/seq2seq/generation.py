"""Greedy decoding and beam search.

Both call `step`, which returns the logits (rows, v) after the tokens (rows, n) so far; the first token is the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]


@torch.no_grad()
def greedy(step: Step, tokens: Tensor, *, end: int, max_length: int) -> list[list[int]]:
    """Greedy decoding: ids of each row without the start and the end.

    >>> after = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 0, 1]])
    >>> greedy(lambda tokens: after[tokens[:, -1]], torch.tensor([[0], [1]]), end=2, max_length=5)
    [[1], []]
    """
    begin, unfinished = tokens.shape[1], torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    while tokens.shape[1] <= max_length and bool(unfinished.any()):
        chosen = step(tokens).argmax(-1).masked_fill(~unfinished, end)
        tokens = torch.cat([tokens, chosen[:, None]], 1)
        unfinished = unfinished & (chosen != end)
    return [_until(row, begin, end) for row in tokens.tolist()]


@torch.no_grad()
def beam_search(
    step: Step,
    reorder: Callable[[Sequence[int]], None],
    tokens: Tensor,
    *,
    end: int,
    max_length: int,
    beams: int,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Beam search: the text of each row with the highest log-probability / length^`length_penalty` (arXiv 1609.08144).

    A row is finished when it has as many finished texts as beams and no open one is better than the worst of them at
    its present length. Rows do not influence each other. Ids are without the start and the end.
    """
    b, begin = tokens.shape
    hypotheses = [_Hypotheses(end, beams) for _ in range(b)]
    scores = torch.zeros(b, 1, dtype=torch.float64, device=tokens.device)
    while tokens.shape[1] <= max_length and not all(one.done for one in hypotheses):
        logits = step(tokens)
        v, width = logits.shape[1], scores.shape[1]
        total = (scores[..., None] + logits.double().log_softmax(-1).view(b, width, v)).flatten(1)
        best, places = total.topk(min(2 * beams, width * v), dim=1)
        texts, length = tokens.tolist(), tokens.shape[1] ** length_penalty
        selected: list[list[tuple[float, int, int]]] = []
        for row, (values, ranked) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            candidates = [
                (value, row * width + place // v, place % v) for value, place in zip(values, ranked, strict=True)
            ]
            selected.append(hypotheses[row].select(candidates, texts, length))
        rows = [origin for row in selected for _, origin, _ in row]
        reorder(rows)
        scores = scores.new_tensor([[value for value, _, _ in row] for row in selected])
        chosen = torch.tensor([[token] for row in selected for _, _, token in row], device=tokens.device)
        tokens = torch.cat([tokens[rows], chosen], 1)
    texts, width = tokens.tolist(), scores.shape[1]
    # Where nothing was finished in time, the best open text.
    return [one.best(_until(texts[row * width], begin, end)) for row, one in enumerate(hypotheses)]


class _Hypotheses:
    """The finished texts of one row."""

    def __init__(self, end: int, beams: int) -> None:
        self.end, self.beams, self.done = end, beams, False
        self.finished: list[tuple[float, list[int]]] = []

    def select(
        self, candidates: list[tuple[float, int, int]], texts: list[list[int]], length: float
    ) -> list[tuple[float, int, int]]:
        """Keep finished texts of ranked candidates (score, row, token), and return the open ones to continue."""
        if not self.done:
            ends = [(value, origin) for value, origin, token in candidates[: self.beams] if token == self.end]
            self.finished += [(value / length, texts[origin][1:]) for value, origin in ends]
        unfinished = [one for one in candidates if one[2] != self.end][: self.beams]
        if len(self.finished) >= self.beams:
            worst = sorted((score for score, _ in self.finished), reverse=True)[self.beams - 1]
            self.done = self.done or unfinished[0][0] / length <= worst
        return unfinished

    def best(self, unfinished: list[int]) -> list[int]:
        """Return the finished text with the highest score, or the unfinished one."""
        return max(self.finished, key=lambda one: one[0])[1] if self.finished else unfinished


def _until(row: list[int], begin: int, end: int) -> list[int]:
    """Return a text without its start, up to the first generated `end`."""
    return row[1 : row.index(end, begin)] if end in row[begin:] else row[1:]
