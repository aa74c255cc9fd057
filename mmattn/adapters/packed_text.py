"""Packed rows: several documents in one row of text, each with a row of memory of its own.

What an adapter does there it does to the documents as rows: their tokens are gathered, adapted, and put back. Whatever
is no part of a document passes through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Names under which flash attention and state-space models are told where documents begin.
BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")


@dataclass(frozen=True)
class PackedText:
    """Documents of packed rows."""

    numbers: Tensor  # (b, l) the number of the document of each token, rising through the flattened rows; -1 is none
    tokens: Tensor  # (t,) places of the tokens of all documents in the flattened rows, in order
    places: Tensor  # (s, longest) the same by document; a shorter one repeats its last
    real: Tensor  # (s, longest) bool, which of them are tokens of the document

    @classmethod
    def of(cls, documents: Tensor) -> PackedText:
        """From the number of the document of each token."""
        flat = documents.flatten()
        tokens = (flat >= 0).nonzero()[:, 0]
        _, lengths = torch.unique_consecutive(flat[tokens], return_counts=True)
        count = torch.arange(int(lengths.max()), device=flat.device)
        starts = lengths.cumsum(0) - lengths
        places = tokens[starts[:, None] + torch.minimum(count, lengths[:, None] - 1)]
        return cls(documents, tokens, places, count < lengths[:, None])

    @property
    def documents(self) -> int:
        """s, documents in all rows."""
        return self.places.shape[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return self.places.shape[1]

    def select(self, rows: Sequence[int]) -> PackedText:
        """The same rows with some of their documents only; the others are passed by."""
        real = self.real[rows]
        longest = int(real.sum(1).max())
        places, real = self.places[rows, :longest], real[:, :longest]
        return PackedText(self.numbers, places[real], places, real)

    def unpack(self, x: Tensor) -> Tensor:
        """Documents as rows (s, longest, …); what follows a shorter one repeats its last token."""
        return x.flatten(0, 1)[self.places.to(x.device)]

    def pack(self, documents: Tensor, x: Tensor) -> Tensor:
        """x (b, l, …) with the tokens of the documents in place of its own."""
        flat, tokens = x.flatten(0, 1), self.tokens.to(x.device)
        return flat.index_copy(0, tokens, documents[self.real.to(x.device)]).view_as(x)


#: Arguments of a host that may say where documents begin.
PACKING_NAMES = {*BOUNDARIES, "seq_idx", "position_ids"}


def packed_text(kwargs: Mapping[str, Any], rows: int, length: int) -> PackedText | None:
    """Return the documents of a call, or None if each row is one document.

    A document begins where positions do not rise, or where `cu_seq_lens_q` or `seq_idx` say so. Where a mask says of
    each token what it sees (four dimensions, or another object), positions say nothing: those of a tree repeat.
    """
    if torch.compiler.is_compiling():
        return None  # it depends on values, which a graph has not
    numbers = _numbers(kwargs, rows, length)
    return None if numbers is None else PackedText.of(numbers)


def _numbers(kwargs: Mapping[str, Any], rows: int, length: int) -> Tensor | None:
    """The number of the document of each token (b, l), -1 for none; None where rows are not packed."""
    boundaries = next((kwargs[name] for name in BOUNDARIES if kwargs.get(name) is not None), None)
    if boundaries is not None:
        place = torch.arange(rows * length, device=boundaries.device)
        number = torch.searchsorted(boundaries, place, right=True) - 1
        return number.masked_fill(place >= boundaries[-1], -1).view(rows, length)
    mask, index, positions = (kwargs.get(name) for name in ("attention_mask", "seq_idx", "position_ids"))
    real = _real(mask, rows, length)
    if index is not None:
        real = index >= 0 if real is None else real.to(index.device) & (index >= 0)
        starts = index[:, 1:] != index[:, :-1]
    elif mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return None
    elif isinstance(positions, Tensor) and positions.dim() == 2 and length > 1:
        positions = positions.expand(rows, -1)
        real = torch.ones_like(positions, dtype=torch.bool) if real is None else real.to(positions.device)
        starts = (positions[:, 1:] <= positions[:, :-1]) & real[:, 1:] & real[:, :-1]
        if not bool(starts.any()):
            return None
    else:
        return None
    begins = torch.cat([real[:, :1], (starts | ~real[:, :-1]) & real[:, 1:]], 1)
    return (begins.flatten().cumsum(0) - 1).view(rows, -1).masked_fill(~real, -1)


def _real(mask: object, rows: int, length: int) -> Tensor | None:
    """Return the tokens (b, l) that are no padding, or None without a mask."""
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
        return mask[:, -length:].bool().expand(rows, -1)
    return None
