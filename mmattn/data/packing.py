"""Documents packed into rows: as few rows as long as the longest, instead of a padded row for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmattn.data.text_batches import IGNORED, TextBatch
from mmattn.errors import ShapeError
from mmattn.memory import Memory


def fill_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Which documents share a row, by first-fit decreasing: no row is longer than the longest document.

    >>> fill_rows([3, 9, 5, 2, 1])
    [[1], [2, 0, 4], [3]]
    """
    longest = max(lengths)
    rows: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        row = next((row for row, room in enumerate(left) if room >= lengths[number]), None)
        if row is None:
            rows.append([])
            left.append(longest)
            row = len(rows) - 1
        rows[row].append(number)
        left[row] -= lengths[number]
    return rows


def pack(
    documents: Sequence[Sequence[int]],
    memory: Memory | None = None,
    unlearned: Sequence[int] | None = None,
    pad: int = 0,
) -> TextBatch:
    """Documents in rows, with positions that begin anew in each; what is left of a row is a document without memory.

    Args:
        documents: ids of each.
        memory: of as many rows, or None.
        unlearned: ids at the beginning of each document that are only read; the first never is predicted.
        pad: id of the padding.

    Raises:
        ShapeError: no documents, an empty one, or a memory with another number of rows.

    >>> batch = pack([[5, 6, 7], [8], [9, 4]])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist(), batch.labels.tolist()
    ([[5, 6, 7], [9, 4, 8]], [[0, 1, 2], [0, 1, 0]], [[-100, 6, 7], [-100, 4, -100]])
    """
    if not documents or not all(len(one) for one in documents):
        raise ShapeError(f"a batch needs documents of at least one id, got {len(documents)}; leave empty texts out")
    if memory is not None and memory.batch != len(documents):
        raise ShapeError(f"{len(documents)} documents need {len(documents)} rows of memory, got {memory.batch}")
    longest = max(map(len, documents))
    ids, positions, labels, order = [], [], [], []
    for row in fill_rows([len(one) for one in documents]):
        parts = [list(documents[number]) for number in row]
        learned = [max(1, 0 if unlearned is None else unlearned[number]) for number in row]
        order += row
        missing = longest - sum(map(len, parts))
        if missing:
            parts.append([pad] * missing)
            learned.append(missing)
            order.append(-1)
        ids.append([one for part in parts for one in part])
        positions.append([place for part in parts for place in range(len(part))])
        labels.append(
            [
                one if place >= begin else IGNORED
                for part, begin in zip(parts, learned, strict=True)
                for place, one in enumerate(part)
            ]
        )
    read = None if memory is None else _ordered(memory, order)
    return TextBatch(torch.tensor(ids), None, torch.tensor(labels), read, torch.tensor(positions))


def _ordered(memory: Memory, order: Sequence[int]) -> Memory:
    """The rows of a memory in this order; -1 is one without any slot."""
    chosen, present = memory[[max(0, row) for row in order]], torch.tensor(order, device=memory.device) >= 0
    mask = chosen.real_slots() & present[:, None]
    return Memory(chosen.tokens, mask, chosen.segments, chosen.scores, check_finite=chosen.finite_checked)
