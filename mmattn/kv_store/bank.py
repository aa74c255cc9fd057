"""`Bank`: keys and values of many entries, computed once, so that a request reads pages instead of projecting its hits.

A bank is a set of tables with a row for every entry: its tokens and mask, its edition (the number of the edit that
wrote it), and for every adapter and layer its keys and values. Row 0 of each table is blank and is read for a missing
hit; entry r is in row r + 1.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.prepared_memory import PreparedMemory
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tensor_cache import TensorVersion
from mmattn.errors import ShapeError
from mmattn.kv_store.files import read_bank, write_bank
from mmattn.kv_store.gathered_memory import GatheredMemory
from mmattn.kv_store.lookup import check_hits, check_rows, memory_of_hits
from mmattn.kv_store.page_formats import PageFormat, page_format
from mmattn.kv_store.pages import gather_pages, projection_of
from mmattn.kv_store.tables import (
    blank_tables,
    check_entries,
    check_versions,
    grown,
    weight_versions,
    weights,
    without_graph,
    write_entries,
    write_pages,
)
from mmattn.memory import Memory


class Bank:
    """Entries with the keys and values that the adapters of a host project of them: `model.bank`, `model.load_bank`.

    Entries have row numbers, counted from 0, that never change. A request sees entries as they were when it gathered
    them. A bank may be used by several threads.

    Args:
        model: the adapted model.
        versions: for each adapter that has pages, the state of the weights that they were computed with.
        form: of the pages.
        tables: as at the head of this file, row 0 blank.
        count: number of entries in the tables.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4)).eval()
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2))
    >>> bank = model.bank(mmattn.Memory(torch.randn(1000, 3, 24)))
    >>> hits = torch.tensor([[17, 903, -1], [903, 5, 11]])  # -1: a missing hit
    >>> prepared = bank.gather(hits, mask=hits >= 0)
    >>> model(torch.tensor([[5, 6, 7], [8, 9, 1]]), memory=prepared).logits.shape
    torch.Size([2, 3, 97])
    """

    def __init__(
        self,
        model: Any,
        versions: Mapping[str, TensorVersion],
        form: PageFormat,
        tables: dict[str, Tensor],
        count: int = 0,
    ) -> None:
        self.model = model
        self._versions = versions
        self._form, self._tables = form, tables
        self._count = count
        self._edits = int(tables["edition"].max())
        # Writers wait for each other; a reader waits only while finished rows are copied into the tables.
        self._writing, self._copying = threading.Lock(), threading.Lock()

    @classmethod
    def from_memory(
        cls, model: Any, memory: Memory | Tensor, dtype: torch.dtype | None = None, quantization: str | None = None
    ) -> Bank:
        """A bank of every row of a memory, for the active adapters; what `model.bank` calls.

        Args:
            model: the adapted model.
            memory: (n, m, e), a row for each entry.
            dtype: of the pages; that of the weights by default.
            quantization: "int8" or "int4", as in `model.bank`.

        Raises:
            ShapeError: a memory that the active adapters cannot read, or one with scores or segments.
            NonFiniteError: NaN or infinity.
            ConditionError: no adapter is active.
            ConfigError: a dtype or a quantisation that pages cannot have, or keys that depend on their position in the
                memory.
        """
        form, memory = page_format(dtype, quantization), check_entries(memory)
        versions = weight_versions(model, model.active, memory.dim)
        bank = cls(model, versions, form, blank_tables(model, versions, form, memory.tokens, memory.batch + 1))
        bank.add(memory)
        return bank

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

    def page_nbytes(self) -> int:
        """Bytes of keys and values alone, scales included."""
        pages = [table for name, table in self._tables.items() if name.rpartition(".")[2] in self._form.parts]
        return sum(table.nbytes for table in pages)

    def __repr__(self) -> str:
        return f"Bank({self._count:,} rows, m={self.slots}, adapters={list(self._versions)}, {self.nbytes():,} bytes)"

    # Requests ----------------------------------------------------------------------------------------------------

    def gather(
        self,
        rows: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[Any]] | None = None,
    ) -> PreparedMemory:
        """The entries of each request as a prepared memory, to be given as `memory`.

        It is what `model.prepare(bank.memory(…))` is, except that keys and values are copied from the pages at their
        first use; later steps and beams use that copy. While gradients are needed, or once an entry or a weight has
        changed since, the tokens gathered here are projected as those of any memory are.

        Args:
            rows: (b, n) int, n entries for each row of text.
            mask: (b, n) bool, False = a missing hit, whose row number (-1, say) and score may be anything.
            scores: (b, n) float, relevance of each entry; for adapters with score_bias.
            sources: for each request one entry per hit: any JSON value.

        Raises:
            IndexError: an entry that was never there, or was removed.
            ShapeError: arguments whose shapes do not fit, or that the adapters cannot read.
            MaskError: a mask that is not bool.
            NonFiniteError: NaN or infinity in a score.
            ConditionError: the weights have changed since the pages were computed.
        """
        self.model.check_attached()
        self._check_fresh()
        memory, table_rows, editions = self._take(rows, mask, scores, sources)
        for name in self._versions:
            self.model.adapter(name).check_memory(memory)
        return GatheredMemory(memory, rows.shape[1], partial(self.keys_and_values, table_rows, editions))

    def memory(
        self,
        rows: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[Any]] | None = None,
    ) -> Memory:
        """The entries of each request as a memory (b, n·m, e), each hit a segment: for training, and for other hosts.

        Args:
            rows: (b, n) int, n entries for each row of text.
            mask: as in `gather`.
            scores: as in `gather`.
            sources: as in `gather`.

        Raises:
            IndexError: an entry that was never there, or was removed.
            ShapeError: arguments whose shapes do not fit.
            MaskError: a mask that is not bool.
            NonFiniteError: NaN or infinity in a score.
        """
        return self._take(rows, mask, scores, sources)[0]

    def keys_and_values(
        self, table_rows: Tensor, editions: Tensor, adapter: Any, layer: int, scores: Tensor | None
    ) -> KeyValue | None:
        """Keys and values of entries from their pages; None where an entry or a weight has changed.

        Args:
            table_rows: (b, n) int, their rows in the tables.
            editions: (b, n) int, the editions that the entries had.
            adapter: the trainable part that reads them.
            layer: number of the host's layer.
            scores: (b, n·m), relevance of each slot, for adapters with score_bias.
        """
        with self._copying:
            version = self._versions.get(adapter.name)
            if version is None or not version.holds(weights(adapter).values()):
                return None
            if not torch.equal(self._tables["edition"][table_rows], editions):
                return None
            projection = projection_of(adapter.attention(layer))
            mask = self._tables[f"{adapter.name}.mask"][table_rows].flatten(1).to(projection.k_proj.weight.device)
            tables = {part: self._tables[f"{adapter.name}.{layer}.{part}"] for part in self._form.parts}
            scores = None if scores is None else scores.to(mask.device)
            return gather_pages(projection, self._form, tables, table_rows, mask, scores)

    @without_graph()
    def _take(
        self, rows: Tensor, mask: Tensor | None, scores: Tensor | None, sources: Sequence[Sequence[Any]] | None
    ) -> tuple[Memory, Tensor, Tensor]:
        """The memory of these hits, and (b, n) their rows in the tables and their editions."""
        hits, device = check_hits(rows, mask, scores, sources), self._tables["tokens"].device
        rows, hits = rows.to(device, torch.long), hits.to(device)
        known = hits & (rows >= 0) & (rows < self._count)
        table_rows = torch.where(known, rows + 1, 0)
        with self._copying:
            editions, real = (self._tables[name][table_rows] for name in ("edition", "mask"))
            tokens = self._tables["tokens"].index_select(0, table_rows.flatten())
        lost = hits & (editions == 0)
        if lost.any():
            request, hit = lost.nonzero()[0].tolist()
            raise IndexError(
                f"request {request} asks for row {int(rows[request, hit])}, which is not in this bank of {self._count} "
                "rows or was removed: search an index of the same entries, and mask missing hits (mask=rows >= 0)"
            )
        tokens = tokens.view(*table_rows.shape, *tokens.shape[1:])
        return memory_of_hits(tokens, real, hits, scores, sources), table_rows, editions

    # Edits -------------------------------------------------------------------------------------------------------

    @without_graph()
    def add(self, memory: Memory | Tensor) -> Tensor:
        """Append entries; returns their row numbers (n,).

        Args:
            memory: (n, m, e), a row for each entry.

        Raises:
            ShapeError: entries of another shape than the others, or with scores or segments.
            NonFiniteError: NaN or infinity.
            ConditionError: the weights have changed since the pages were computed, or the entries need gradients.
        """
        with self._writing:
            memory = self._check_entries(memory)
            begin, end = self._count + 1, self._count + 1 + memory.batch
            room = len(self._tables["edition"])
            if end > room:
                for name, table in self._tables.items():
                    self._tables[name] = grown(table, max(end, room + room // 2))
            write_entries(self._tables, begin, memory, self.model, self._versions, self._form)
            with self._copying:
                self._edits += 1
                self._tables["edition"][begin:end] = self._edits
                self._count += memory.batch
            return torch.arange(begin - 1, end - 1)

    @without_graph()
    def update(self, rows: Tensor | Sequence[int], memory: Memory | Tensor) -> None:
        """Replace the entries of these rows; a removed row has an entry again.

        Args:
            rows: (n,) int.
            memory: (n, m, e), a row for each entry.

        Raises:
            IndexError: a row that was never there.
            ShapeError: rows that are no list of ints or name one twice, or entries as in `add`.
            NonFiniteError: NaN or infinity.
            ConditionError: as in `add`.
        """
        with self._writing:
            table_rows, memory = self._table_rows(rows), self._check_entries(memory)
            if len(table_rows) != memory.batch:
                raise ShapeError(
                    f"{len(table_rows)} rows were to be updated with {memory.batch} entries: give one for each"
                )
            new = {name: table.new_zeros(len(table_rows), *table.shape[1:]) for name, table in self._tables.items()}
            write_entries(new, 0, memory, self.model, self._versions, self._form)
            with self._copying:
                self._edits += 1
                new["edition"].fill_(self._edits)
                for name, table in self._tables.items():
                    table.index_copy_(0, table_rows, new[name])

    @without_graph()
    def remove(self, rows: Tensor | Sequence[int]) -> None:
        """Erase the entries of these rows: gathering them raises from now on, and other rows keep their numbers.

        Args:
            rows: (n,) int.

        Raises:
            IndexError: a row that was never there.
            ShapeError: rows that are no list of ints, or name one twice.
        """
        with self._writing:
            table_rows = self._table_rows(rows)
            with self._copying:
                for table in self._tables.values():
                    table.index_fill_(0, table_rows, 0)

    @without_graph()
    def refresh(self) -> None:
        """Compute all pages again, with the weights of this moment and for the adapters that are active now.

        Raises:
            ConditionError: no adapter is active.
            ShapeError: an active adapter reads entries of another width.
        """
        with self._writing:
            versions = weight_versions(self.model, self.model.active, self._tables["tokens"].shape[2])
            old = {name: self._tables[name] for name in ("tokens", "mask", "edition")}
            tables = blank_tables(self.model, versions, self._form, old["tokens"], len(old["tokens"])) | old
            entries = slice(1, self._count + 1)
            write_pages(tables, 1, old["tokens"][entries], old["mask"][entries], self.model, versions, self._form)
            with self._copying:
                self._versions, self._tables = versions, tables

    def _check_entries(self, memory: Memory | Tensor) -> Memory:
        self._check_fresh()
        return check_entries(memory, like=self._tables["tokens"])

    def _check_fresh(self) -> None:
        """Refuse to use pages that were computed with other weights."""
        check_versions(self.model, self._versions, self._count)

    def _table_rows(self, rows: Tensor | Sequence[int]) -> Tensor:
        """The rows of the tables that hold these entries."""
        return check_rows(rows, self._count).to(self._tables["tokens"].device) + 1

    # Files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the bank to one safetensors file, atomically; `model.load_bank` reads it.

        Args:
            path: the file.

        Raises:
            ConditionError: the weights have changed since the pages were computed.
            OSError: the folder is missing or not writable; a file that was there is unchanged.
        """
        with self._writing:
            self._check_fresh()
            tables = {name: table[: self._count + 1] for name, table in self._tables.items()}
            write_bank(path, self.model, self._versions, self._form, tables)

    @classmethod
    def load(cls, model: Any, path: str | PathLike[str], mapped: bool = False) -> Bank:
        """The bank that `save` wrote; what `model.load_bank` calls.

        Args:
            model: the adapted model.
            path: the file.
            mapped: leave the tables in the file, as in `model.load_bank`.

        Raises:
            AdapterFileError: the file is torn, changed or something else, or its pages are of another adapter.
        """
        names, form, tables = read_bank(path, model, mapped)
        versions = weight_versions(model, names, tables["tokens"].shape[2])
        return cls(model, versions, form, tables, count=len(tables["edition"]) - 1)
