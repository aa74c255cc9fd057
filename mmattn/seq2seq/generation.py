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

    Args:
        step: from tokens (b, n) to the logits (b, v) of the next one.
        tokens: (b, n) ids that every text begins with, the start first.
        end: id that ends a text.
        max_length: tokens of a text at most, the end included and the start not.

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

    Args:
        step: from tokens (rows, n) to the logits (rows, v) of the next one; rows are b at first, then b · beams.
        reorder: called before each step but the first with the row of the step before that each row continues.
        tokens: (b, n) ids that every text begins with, the start first.
        end: id that ends a text.
        max_length: tokens of a text at most, the end included and the start not.
        beams: number of open texts of each row.
        length_penalty: exponent of the length; above 0 longer texts score higher.
    """
    b, begin = tokens.shape
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(b)]
    done = [False] * b
    scores = torch.zeros(b, 1, dtype=torch.float64, device=tokens.device)
    while tokens.shape[1] <= max_length and not all(done):
        logits = step(tokens)
        v, width = logits.shape[1], scores.shape[1]
        length = tokens.shape[1] ** length_penalty
        total = (scores[..., None] + logits.double().log_softmax(-1).view(b, width, v)).flatten(1)
        best, places = total.topk(min(2 * beams, width * v), dim=1)
        rows, chosen, kept = [], [], []
        for row, (values, found) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            going: list[tuple[float, int, int]] = []
            for rank, (value, place) in enumerate(zip(values, found, strict=True)):
                origin, token = row * width + place // v, place % v
                if token != end:
                    going.append((value, origin, token))
                elif rank < beams and not done[row]:
                    finished[row].append((value / length, tokens[origin, 1:].tolist()))
            going = going[:beams]
            if len(finished[row]) >= beams:
                worst = sorted((score for score, _ in finished[row]), reverse=True)[beams - 1]
                done[row] = done[row] or going[0][0] / length <= worst
            kept.append([value for value, _, _ in going])
            rows += [origin for _, origin, _ in going]
            chosen += [token for _, _, token in going]
        reorder(rows)
        scores = torch.tensor(kept, dtype=torch.float64, device=tokens.device)
        tokens = torch.cat([tokens[rows], torch.tensor(chosen, device=tokens.device)[:, None]], 1)
    texts, width = tokens.tolist(), scores.shape[1]
    # Where nothing was finished in time, the best of what is open.
    return [
        max(found, key=lambda one: one[0])[1] if found else _until(texts[row * width], begin, end)
        for row, found in enumerate(finished)
    ]


def _until(row: list[int], begin: int, end: int) -> list[int]:
    """A text without its start, up to the first `end` that was written."""
    return row[1 : row.index(end, begin)] if end in row[begin:] else row[1:]
