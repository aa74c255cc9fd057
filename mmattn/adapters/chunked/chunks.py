"""A memory whose segments name chunks of a text, laid out by chunk: a row for each."""

from __future__ import annotations

import torch
from torch import Tensor

from mmattn.memory import Memory


def grouped(labels: Tensor) -> tuple[list[int], Tensor]:
    """Where equal labels (n,) stand; negative ones belong nowhere.

    Returns:
        the k labels there are, rising; their places (k, most) in rising order, -1 after those of a rarer label.

    >>> grouped(torch.tensor([7, -1, 2, 7, 7]))
    ([2, 7], tensor([[ 2, -1, -1],
            [ 0,  3,  4]]))
    """
    places = (labels >= 0).nonzero()[:, 0]
    if not len(places):
        return [], places.new_empty(0, 0)
    places = places[labels[places].argsort(stable=True)]
    found, counts = labels[places].unique_consecutive(return_counts=True)
    rows = places.split(counts.tolist())
    return found.tolist(), torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def chunk_slots(memory: Memory) -> tuple[list[tuple[int, int]], Tensor]:
    """The (row, chunk) pairs a memory with segments has neighbours for, and their slots among all b·m, as `grouped`."""
    assert memory.segments is not None
    segments = memory.segments if memory.mask is None else memory.segments.masked_fill(~memory.mask, -1)
    count = int(segments.max()) + 1 if segments.numel() else 0
    rows = torch.arange(memory.batch, device=segments.device)[:, None]
    labels, slots = grouped(torch.where(segments < 0, -1, segments + rows * count).flatten())
    return [divmod(label, count) for label in labels], slots


def by_chunk(memory: Memory) -> Memory:
    """The neighbours of each chunk as a row: (b, m, e) with segments to (k, longest, e), in the order of `chunk_slots`.

    >>> memory = Memory(torch.arange(6.0).view(2, 3, 1), segments=torch.tensor([[0, 2, 2], [-1, 0, -1]]))
    >>> by_chunk(memory).tokens[..., 0], by_chunk(memory).lengths
    (tensor([[0., 0.],
            [1., 2.],
            [4., 0.]]), [1, 2, 1])
    """
    _, slots = chunk_slots(memory)
    mask = slots >= 0
    index = slots.clamp(min=0)
    tokens = memory.tokens.flatten(0, 1)[index].masked_fill(~mask[..., None], 0)
    scores = None if memory.scores is None else memory.scores.flatten()[index]
    return Memory(tokens, None if bool(mask.all()) else mask, scores=scores, check_finite=False)
