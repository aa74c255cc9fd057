"""A bank: keys and values of many entries, made once, so that a request gathers pages instead of projecting its hits.

Tables with a row for every entry: its tokens and mask, how often it was written, and for every adapter and layer its
keys and values. Row 0 of each table is blank and is what a missing hit reads; entry r stands in row r + 1.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.adapter_layers import AdapterLayers
from mmattn.adapters.projected import PreparedMemory
from mmattn.core.kv import KeyValue
from mmattn.core.tensor_cache import TensorVersion
from mmattn.errors import ConditionError, ConfigError, ShapeError, check_bool_mask
from mmattn.hosts.bank.files import read_bank, write_bank
from mmattn.hosts.bank.pages import gather_pages, projection_of
from mmattn.hosts.bank.tables import blank_tables, check_entries, grown, is_int, keeping, makers_of, page_rows, weights
from mmattn.memory import Memory

# Slots projected at a time.
CHUNK = 1 << 14


class Bank:
    """Entries whose keys and values are kept for the adapters of a host; made by `model.bank` and `model.load_bank`.

    Entries have row numbers, counted from 0, that never change. A request sees entries as they were when it gathered
    them. A bank may be used by several threads.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4)).eval()
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2))
    >>> bank = model.bank(mmattn.Memory(torch.randn(1000, 3, 24)))
    >>> hits = torch.tensor([[17, 903, -1], [903, 5, 11]])  # -1: nothing was found
    >>> prepared = bank.gather(hits, mask=hits >= 0)
    >>> model(torch.tensor([[5, 6, 7], [8, 9, 1]]), memory=prepared).logits.shape
    torch.Size([2, 3, 97])
    """

    def __init__(
        self,
        model: Any,
        makers: dict[str, TensorVersion],
        tables: dict[str, Tensor],
        dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self._makers = makers
        self._tables = tables
        self._dtype = dtype
        self._count = 0
        self._edits = 0
        # Writers wait for each other; a reader waits only while finished rows are put in their place.
        self._writing, self._placing = threading.Lock(), threading.Lock()

    @classmethod
    def make(cls, model: Any, memory: Memory | Tensor, dtype: torch.dtype | None = None) -> Bank:
        """Project every entry of a memory (n, m, e): what `model.bank` calls."""
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"keys and values are kept in a floating point dtype, got {dtype!r}")
        memory = check_entries(memory)
        makers = makers_of(model, model.active, memory.dim)
        bank = cls(model, makers, blank_tables(model, makers, memory.tokens, memory.batch + 1, dtype), dtype)
        bank.add(memory)
        return bank

    # Looking -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of rows, removed ones included."""
        return self._count

    @property
    def slots(self) -> int:
        """Number of slots m of every entry."""
        return self._tables["tokens"].shape[1]

    def nbytes(self) -> int:
        """Bytes of all tables, in memory or in the file they are mapped from."""
        return sum(table.nbytes for table in self._tables.values())

    def __repr__(self) -> str:
        return f"Bank({self._count:,} rows, m={self.slots}, adapters={list(self._makers)}, {self.nbytes():,} bytes)"

    def gather(
        self,
        rows: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[Any]] | None = None,
    ) -> PreparedMemory:
        """The entries that each request found, to be given as `memory`: what `model.prepare(bank.memory(…))` is.

        Its pages are copied at their first use, then reused by steps and beams. While gradients are needed, or once an
        entry or a weight has changed since, the tokens gathered here are projected as those of any memory are.

        Args:
            rows: (b, n) int, n entries for each row of text.
            mask: (b, n) bool, False = a missing hit, whose row number (-1, say) and score may be anything.
            scores: (b, n) float, how well each entry fits; for adapters with score_bias.
            sources: for each request one entry per hit: anything JSON can hold.

        Raises:
            IndexError: an entry that was never there, or was removed. ShapeError, MaskError, NonFiniteError: what was
                given does not fit. ConditionError: the weights have changed since the pages were made.
        """
        self.model.check_attached()
        self._check_fresh()
        memory, found, editions = self._take(rows, mask, scores, sources)
        for name in self._makers:
            self.model.adapter(name).check_memory(memory)
        return GatheredMemory(self, memory, found, editions)

    def memory(
        self,
        rows: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[Any]] | None = None,
    ) -> Memory:
        """The same entries as a memory (b, n·m, e), each hit a segment: for training, and for other hosts."""
        return self._take(rows, mask, scores, sources)[0]

    @keeping()
    def _take(
        self, rows: Tensor, mask: Tensor | None, scores: Tensor | None, sources: Sequence[Sequence[Any]] | None
    ) -> tuple[Memory, Tensor, Tensor]:
        """The memory of these hits, their rows in the tables, and how often each had been written."""
        if not isinstance(rows, Tensor) or rows.dim() != 2 or not is_int(rows):
            given = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ShapeError(f"rows must be an int tensor (b, n), the entries each request found; got {given}")
        device, (b, n) = self._tables["tokens"].device, rows.shape
        hits = torch.ones_like(rows, dtype=torch.bool) if mask is None else check_bool_mask("mask", mask)
        for what, shape in (("mask", hits.shape), ("scores", rows.shape if scores is None else scores.shape)):
            if shape != rows.shape:
                raise ShapeError(f"{what} must be (b, n) = {(b, n)} as the rows are, got {tuple(shape)}")
        if sources is not None and [len(row) for row in sources] != [n] * b:
            raise ShapeError(f"sources need one entry per hit, {b} rows of {n}; got {[len(row) for row in sources]}")
        rows, hits = rows.to(device, torch.long), hits.to(device)
        known = hits & (rows >= 0) & (rows < self._count)
        found = torch.where(known, rows + 1, 0)
        with self._placing:
            editions = self._tables["edition"][found]
            tokens = self._tables["tokens"].index_select(0, found.flatten())
            real = self._tables["mask"][found]
        lost = hits & (editions == 0)
        if lost.any():
            request, hit = lost.nonzero()[0].tolist()
            raise IndexError(
                f"request {request} found row {int(rows[request, hit])}, which is not in this bank of {self._count} "
                "rows or was removed: search an index of the same entries, and mask missing hits (mask=rows >= 0)"
            )
        m = self.slots
        if scores is not None:
            # A missing hit's score may be anything.
            scores = torch.where(hits, scores.to(device), 0).repeat_interleave(m, 1)
        segments = torch.arange(n, device=device).repeat_interleave(m).expand(b, -1)
        repeated = None if sources is None else [[source for source in row for _ in range(m)] for row in sources]
        tokens, real = tokens.view(b, n * m, tokens.shape[2]), real.view(b, n * m)
        memory = Memory(tokens, real, segments, scores, repeated, check_finite=False)
        if scores is not None:
            Memory(tokens.new_empty(b, n * m, 0), scores=scores).check_finite()
        return memory, found, editions

    def _pages(
        self, found: Tensor, editions: Tensor, name: str, adapter: AdapterLayers, layer: int, scores: Tensor | None
    ) -> KeyValue | None:
        """Keys and values from the pages of these rows of the tables; None where they are no longer what was found."""
        with self._placing:
            maker = self._makers.get(name)
            if maker is None or not maker.holds(weights(adapter).values()):
                return None
            if not torch.equal(self._tables["edition"][found], editions):
                return None
            projection = projection_of(adapter.attention(layer))
            mask = self._tables[f"{name}.mask"][found].flatten(1).to(projection.k_proj.weight.device)
            keys, values = self._tables[f"{name}.{layer}.keys"], self._tables[f"{name}.{layer}.values"]
            scores = None if scores is None else scores.to(mask.device)
            return gather_pages(projection, keys, values, found, mask, scores)

    # Changing ----------------------------------------------------------------------------------------------------

    @keeping()
    def add(self, memory: Memory | Tensor) -> Tensor:
        """Put more entries (n, m, e) behind the others; returns their row numbers (n,).

        Raises:
            ShapeError, NonFiniteError: entries unlike the others. ConditionError: as for `gather`.
        """
        with self._writing:
            memory = self._check_alike(memory)
            begin, end = self._count + 1, self._count + 1 + memory.batch
            room = len(self._tables["edition"])
            if end > room:
                for name, table in self._tables.items():
                    self._tables[name] = grown(table, max(end, room + room // 2))
            self._write(self._tables, begin, memory)
            with self._placing:
                self._edits += 1
                self._tables["edition"][begin:end] = self._edits
                self._count += memory.batch
            return torch.arange(begin - 1, end - 1)

    @keeping()
    def update(self, rows: Tensor | Sequence[int], memory: Memory | Tensor) -> None:
        """Put other entries (n, m, e) at these rows (n,); at a removed row there is an entry again.

        Raises:
            IndexError: a row that was never there. ShapeError, NonFiniteError, ConditionError: as for `add`.
        """
        with self._writing:
            places, memory = self._places(rows), self._check_alike(memory)
            if len(places) != memory.batch:
                raise ShapeError(
                    f"{len(places)} rows were to be updated with {memory.batch} entries: give one for each"
                )
            new = {name: table.new_zeros(len(places), *table.shape[1:]) for name, table in self._tables.items()}
            self._write(new, 0, memory)
            with self._placing:
                self._edits += 1
                new["edition"].fill_(self._edits)
                for name, table in self._tables.items():
                    table.index_copy_(0, places, new[name])

    @keeping()
    def remove(self, rows: Tensor | Sequence[int]) -> None:
        """Wipe these rows (n,): gathering them is refused from now on, and other rows keep their numbers.

        Raises:
            IndexError: a row that was never there.
        """
        with self._writing:
            places = self._places(rows)
            with self._placing:
                for table in self._tables.values():
                    table.index_fill_(0, places, 0)

    @keeping()
    def refresh(self) -> None:
        """Make all pages anew, with the weights of this moment and for the adapters that are active now."""
        with self._writing:
            makers = makers_of(self.model, self.model.active, self._tables["tokens"].shape[2])
            old = {name: self._tables[name] for name in ("tokens", "mask", "edition")}
            tables = blank_tables(self.model, makers, old["tokens"], len(old["tokens"]), self._dtype) | old
            entries = slice(1, self._count + 1)
            self._project(tables, makers, 1, old["tokens"][entries], old["mask"][entries])
            with self._placing:
                self._makers, self._tables = makers, tables

    def _write(self, tables: dict[str, Tensor], begin: int, memory: Memory) -> None:
        """Put entries and their pages at row `begin` and after of these tables; their editions are still 0."""
        tokens, mask = memory.tokens, memory._filled("mask")
        end = begin + len(tokens)
        tables["tokens"][begin:end] = tokens
        tables["tokens"][begin:end].masked_fill_(~mask.to(tables["mask"].device)[..., None], 0)
        tables["mask"][begin:end] = mask
        self._project(tables, self._makers, begin, tables["tokens"][begin:end], tables["mask"][begin:end])

    def _project(
        self, tables: dict[str, Tensor], makers: dict[str, TensorVersion], begin: int, tokens: Tensor, mask: Tensor
    ) -> None:
        step = max(1, CHUNK // self.slots)
        for i in range(0, len(tokens), step):
            piece = Memory(tokens[i : i + step], mask[i : i + step], check_finite=False)
            for name, made in page_rows(self.model, makers, piece).items():
                tables[name][begin + i : begin + i + len(made)] = made

    def _check_alike(self, memory: Memory | Tensor) -> Memory:
        memory, tokens = check_entries(memory), self._tables["tokens"]
        if memory.tokens.shape[1:] != tokens.shape[1:]:
            raise ShapeError(
                f"the entries of this bank are (n, {tokens.shape[1]}, {tokens.shape[2]}), got "
                f"{tuple(memory.tokens.shape)}: pad shorter ones and mask the rest"
            )
        self._check_fresh()
        return memory

    def _check_fresh(self) -> None:
        """Refuse pages that other weights would have made."""
        for name, maker in self._makers.items():
            if not maker.holds(weights(self.model.adapter(name)).values()):
                raise ConditionError(
                    f"the weights of adapter {name!r} have changed since the pages of this bank of {self._count} rows "
                    "were made: bank.refresh() makes them anew, bank.memory(rows) gives the entries without them"
                )

    def _places(self, rows: Tensor | Sequence[int]) -> Tensor:
        """Where in the tables these entries stand."""
        given = torch.as_tensor(rows)
        given = given.long() if not given.numel() else given
        if given.dim() != 1 or not is_int(given):
            raise ShapeError(f"rows must be ints (n,), got {given.dtype} {tuple(given.shape)}")
        wrong = given[(given < 0) | (given >= self._count)]
        if len(wrong):
            raise IndexError(f"row {int(wrong[0])} was asked for, and this bank has rows 0 to {self._count - 1}")
        if len(given.unique()) != len(given):
            raise ShapeError("a row stands twice in rows: give each one once")
        return given.to(self._tables["tokens"].device).long() + 1

    # Files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the bank to one safetensors file, atomically; `model.load_bank` reads it.

        Raises:
            ConditionError: the weights have changed since the pages were made.
        """
        with self._writing:
            self._check_fresh()
            tables = {name: table[: self._count + 1] for name, table in self._tables.items()}
            write_bank(path, self.model, self._makers, tables, self._dtype)

    @classmethod
    def load(cls, model: Any, path: str | PathLike[str], mapped: bool = False) -> Bank:
        """Read what `save` wrote: what `model.load_bank` calls."""
        names, tables, dtype = read_bank(path, model, mapped)
        bank = cls(model, makers_of(model, names, tables["tokens"].shape[2]), tables, dtype)
        bank._count, bank._edits = len(tables["edition"]) - 1, int(tables["edition"].max())
        return bank


class GatheredMemory(PreparedMemory):
    """Entries of a bank as one memory; its keys and values are their pages, as long as those are what was found."""

    def __init__(self, bank: Bank, memory: Memory, found: Tensor, editions: Tensor) -> None:
        super().__init__(memory)
        self._bank, self._found, self._editions = bank, found, editions
        self._unedited = TensorVersion(memory.tensors())

    def read(self, adapter: Any) -> Memory:
        """Which slots there are, where their contents have become keys and values; else as of any prepared memory."""
        pages = self._pages(adapter, adapter.layers[0])
        if pages is None:
            return super().read(adapter)
        slots: Memory = self._cache_of(adapter).get(("slots", pages.keys.device), [], lambda: self._slots(pages))
        return slots

    def project(self, adapter: Any, layer: int, memory: Memory, queries: int) -> KeyValue:
        """The pages of these entries, or keys and values as of any prepared memory."""
        pages = self._pages(adapter, layer)
        if pages is not None:
            return pages
        # An entry may have been written after `read` had found the pages of the first layer.
        return super().project(adapter, layer, memory if memory.dim else super().read(adapter), queries)

    def _pages(self, adapter: Any, layer: int) -> KeyValue | None:
        """Keys and values of these entries from their pages; None where they are no longer what was found."""
        if self.is_uncached(adapter):
            return None
        attention = adapter.attention(layer)
        sources = [*self.memory.tensors(), *adapter.reading_parameters(), *attention.projecting_parameters()]

        def gather() -> KeyValue | None:
            if not self._unedited.holds(self.memory.tensors()):
                return None
            scores = self.memory.scores if adapter.score_bias else None
            return self._bank._pages(self._found, self._editions, adapter.name, adapter, layer, scores)

        pages: KeyValue | None = self._cache_of(adapter).get(("pages", layer), sources, gather)
        return pages

    def _slots(self, made: KeyValue) -> Memory:
        (b, n), device = self._found.shape, made.keys.device
        segments = torch.arange(n, device=device).repeat_interleave(made.slots // max(n, 1)).expand(b, -1)
        return Memory(made.keys.new_empty(b, made.slots, 0), made.mask, segments, check_finite=False)
