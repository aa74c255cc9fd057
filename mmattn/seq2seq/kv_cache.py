"""Keys and values of a text that grows token by token: what a cache is, and one that holds each row in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mmattn.errors import ShapeError


class Cache(Protocol):
    """The keys and values of a text that grows, as attention and generation use them."""

    @property
    def length(self) -> int:
        """Tokens held, between two calls of a model."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new tokens (b, g, l, k) of a layer, and give those of all tokens so far (b, g, m, k)."""

    def reorder(self, rows: Sequence[int]) -> None:
        """Go on with these rows, some of them several times (beams), some not at all."""


class GrowingCache:
    """Keys and values of a text that grows, layer by layer, each row in one piece.

    >>> cache = GrowingCache()
    >>> keys, values = cache.append(0, torch.ones(2, 3, 5, 7), torch.ones(2, 3, 5, 7))
    >>> cache.append(0, keys[:, :, :1], values[:, :, :1])[0].shape, cache.length
    (torch.Size([2, 3, 6, 7]), 6)
    """

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        """Tokens held, between two calls of a model."""
        return self._layers[0][0].shape[2] if self._layers else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new tokens (b, g, l, k) of a layer, and give those of all tokens so far (b, g, m, k).

        Raises:
            ShapeError: other rows or heads than those held.
        """
        if layer == len(self._layers):
            self._layers.append((keys, values))
            return keys, values
        held = self._layers[layer]
        if [*held[0].shape[:2], held[0].shape[3]] != [*keys.shape[:2], keys.shape[3]]:
            raise ShapeError(
                f"the cache holds keys {tuple(held[0].shape)} (b, g, m, k) and got {tuple(keys.shape)} to append to "
                "them: reorder it to the rows of the text, or begin a new one"
            )
        self._layers[layer] = torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2)
        return self._layers[layer]

    def reorder(self, rows: Sequence[int]) -> None:
        """Go on with these rows, some of them several times (beams), some not at all; each is a copy."""
        if self._layers:
            selected = torch.tensor(list(rows), dtype=torch.long, device=self._layers[0][0].device)
            self._layers = [
                (keys.index_select(0, selected), values.index_select(0, selected)) for keys, values in self._layers
            ]

    def fork(self, length: int | None = None) -> GrowingCache:
        """Another cache that begins with the first `length` tokens of this one, all by default; nothing is copied."""
        other = GrowingCache()
        other._layers = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self._layers]
        return other

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)
