"""Keys and values of growing texts in pages of fixed size, shared by texts with a common beginning (arXiv 2309.06180).

A page holds a few tokens in all layers. Texts take pages as they grow; beams and requests with a common beginning hold
the same pages, and a page that several hold is copied before one of them writes into it. For a step, the pages of one
layer are put side by side, so that the core reads them as it reads any keys and values: what is saved is what stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mmattn.errors import ConfigError, ShapeError, check_int


class PagePool:
    """The pages of all texts of a model, and which of them are free; for one thread at a time.

    Args:
        layers: number of layers of the model.
        num_kv_heads: g.
        head_dim: k.
        page_size: tokens of a page.
        device: of the pages.
        dtype: of the pages.

    Raises:
        ConfigError: a size below 1.

    >>> pool = PagePool(layers=1, num_kv_heads=2, head_dim=3, page_size=4)
    >>> cache = pool.cache(rows=1)
    >>> _ = cache.append(0, torch.ones(1, 2, 5, 3), torch.ones(1, 2, 5, 3))
    >>> cache.reorder([0, 0, 0])
    >>> pool.used
    2
    >>> _ = cache.append(0, torch.ones(3, 2, 1, 3), torch.ones(3, 2, 1, 3))
    >>> pool.used  # the full page is still shared, the one written to is not
    4
    """

    def __init__(
        self,
        layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.layers, self.page_size = check_int("layers", layers), check_int("page_size", page_size)
        g, k = check_int("num_kv_heads", num_kv_heads), check_int("head_dim", head_dim)
        # Keys and values; a tensor made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            self._pages = torch.empty(2, layers, 0, g, page_size, k, device=device, dtype=dtype)
        self._holders: list[int] = []
        self._free: list[int] = []
        self.peak = 0

    @property
    def used(self) -> int:
        """Number of pages that a text holds; `peak` is the largest there ever was."""
        return len(self._holders) - len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, keys and values of all layers."""
        _, _, _, g, size, k = self._pages.shape
        return 2 * self.layers * g * size * k * self._pages.element_size()

    def nbytes(self) -> int:
        """Return the bytes of the pages that a text holds."""
        return self.used * self.page_bytes

    def cache(self, rows: int) -> PagedCache:
        """Return an empty cache for `rows` texts, which grow together."""
        return PagedCache(self, [[] for _ in range(check_int("rows", rows))], 0)

    def take(self) -> int:
        """Return a page for one holder."""
        if not self._free:
            count, more = len(self._holders), max(16, len(self._holders))
            with torch.inference_mode(False), torch.no_grad():
                pages = self._pages.new_empty(2, self.layers, count + more, *self._pages.shape[3:])
                pages[:, :, :count] = self._pages
            self._pages = pages
            self._holders += [0] * more
            self._free += range(count + more - 1, count - 1, -1)
        page = self._free.pop()
        self._holders[page] = 1
        self.peak = max(self.peak, self.used)
        return page

    def hold(self, tables: Iterable[Sequence[int]]) -> None:
        """Add a holder to each page as often as it is named."""
        for table in tables:
            for page in table:
                self._holders[page] += 1

    def give_back(self, tables: list[list[int]]) -> None:
        """Remove a holder from each page as often as it is named; pages without one are free. Leaves `tables` empty."""
        for table in tables:
            for page in table:
                self._holders[page] -= 1
                if not self._holders[page]:
                    self._free.append(page)
        tables.clear()

    def writable(self, page: int) -> int:
        """Return a page with these contents and one holder: the same one, or a copy where others hold it, too."""
        if self._holders[page] == 1:
            return page
        copy = self.take()
        self._holders[page] -= 1
        with torch.no_grad():
            self._pages[:, :, copy] = self._pages[:, :, page]
        return copy

    def check(self, layer: int, rows: int, keys: Tensor, values: Tensor) -> None:
        """Refuse keys and values that these pages cannot hold."""
        _, _, _, g, _, k = self._pages.shape
        fits = keys.dim() == 4 and (keys.shape[0], keys.shape[1], keys.shape[3]) == (rows, g, k)
        if not fits or keys.shape != values.shape or layer >= self.layers:
            raise ShapeError(
                f"these pages hold {self.layers} layers of keys and values ({rows}, {g}, l, {k}), {rows} rows as now; "
                f"got {tuple(keys.shape)} and {tuple(values.shape)} for layer {layer}"
            )
        if keys.dtype != self._pages.dtype or keys.device != self._pages.device:
            raise ShapeError(
                f"these pages are {self._pages.dtype} on {self._pages.device}, and the keys {keys.dtype} on "
                f"{keys.device}: make the pool as the model is"
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ConfigError("pages keep no gradients: run under torch.no_grad(), or train without a cache")

    def write(self, layer: int, pages: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values (b, g, l, k) of a layer into pages (b, l), at places (l,) in them."""
        with torch.no_grad():
            for table, tokens in zip(self._pages[:, layer], (keys, values), strict=True):
                table[pages.flatten(), :, places.repeat(len(pages))] = tokens.transpose(1, 2).flatten(0, 1)

    def read(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (b, g, length, k) of a layer from pages (b, n)."""
        keys, values = (table[pages].transpose(1, 2).flatten(2, 3)[:, :, :length] for table in self._pages[:, layer])
        return keys, values


class PagedCache:
    """Keys and values of texts that grow together, in pages of a `PagePool`, by `pool.cache(rows)`.

    Its pages go back to the pool with `free()`, or when nothing refers to it any more.
    """

    def __init__(self, pool: PagePool, tables: list[list[int]], length: int) -> None:
        self.pool, self._tables = pool, tables
        self._lengths = [length] * pool.layers
        self.free = weakref.finalize(self, pool.give_back, tables)

    @property
    def length(self) -> int:
        """Tokens held, between two calls of a model."""
        return self._lengths[0]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens (b, g, l, k) of a layer, and return those of all tokens so far (b, g, m, k).

        Raises:
            ConfigError: gradients would be lost.
            ShapeError: other rows, heads, layers, dtype or device than those of the pool.
        """
        self.pool.check(layer, len(self._tables), keys, values)
        size, begin = self.pool.page_size, self._lengths[layer]
        end = begin + keys.shape[2]
        for table in self._tables:
            for place in range(begin // size, -(-end // size)):
                if place == len(table):
                    table.append(self.pool.take())
                else:
                    table[place] = self.pool.writable(table[place])
        pages, places = torch.tensor(self._tables, device=keys.device), torch.arange(begin, end, device=keys.device)
        self.pool.write(layer, pages[:, places // size], places % size, keys, values)
        self._lengths[layer] = end
        return self.pool.read(layer, pages, end)

    def reorder(self, rows: Sequence[int]) -> None:
        """Continue with these rows, some of them several times (beams), some not at all; nothing is copied."""
        selected = [list(self._tables[row]) for row in rows]
        self.pool.hold(selected)
        self.pool.give_back(self._tables)
        self._tables += selected

    def fork(self, length: int | None = None) -> PagedCache:
        """Return another cache that begins with the first `length` tokens of this one, all by default, on its pages.

        Raises:
            ConfigError: more tokens than there are.
        """
        length = check_int("length", self.length if length is None else length, at_least=0, at_most=self.length)
        tables = [table[: -(-length // self.pool.page_size)] for table in self._tables]
        self.pool.hold(tables)
        return PagedCache(self.pool, tables, length)

    def nbytes(self) -> int:
        """Return the bytes of its pages, each counted once."""
        return len({page for table in self._tables for page in table}) * self.pool.page_bytes
