"""`Bank`: keys and values of many entries, computed once; a request reads pages instead of projecting its hits."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.projection import PreparedMemory, Reader
from mmattn.core.key_values import KeyValue
from mmattn.errors import ConditionError, ShapeError, check_bool_mask
from mmattn.hosts.model import AdaptedModel
from mmattn.kv_store.pages import (
    Tables,
    check_dtype,
    check_versions,
    gather_pages,
    page_tables,
    read_bank,
    weight_versions,
    weights,
    without_graph,
    write_bank,
)
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import TensorVersion, Values, cached


class GatheredMemory(PreparedMemory):
    """A prepared memory of n entries per row, whose keys and values are those of their pages while these hold."""

    def __init__(self, memory: Memory, versions: Mapping[str, TensorVersion], tables: Tables, rows: Tensor) -> None:
        super().__init__(memory)
        self._versions, self._tables, self._rows = versions, tables, rows
        self._unedited = TensorVersion(memory.tensors())

    def read(self, adapter: Reader, values: Values | None) -> Memory:
        """Return the slots as an adapter reads them: without vectors if keys and values come from the pages."""
        projected = self._from_pages(adapter, adapter.layers[0], values)
        if projected is None or values is None:
            return super().read(adapter, values)
        return cached(values, ("slots", projected.keys.device), partial(self._slots, projected))

    def project(
        self, adapter: Reader, layers: Sequence[int], read: Memory, queries: int, values: Values | None
    ) -> dict[int, KeyValue]:
        """Return keys and values from the pages, or else as any prepared memory does."""
        pages = {layer: self._from_pages(adapter, layer, values) for layer in layers}
        projected = {layer: page for layer, page in pages.items() if page is not None}
        if missing := [layer for layer in layers if layer not in projected]:
            # An entry may have been written after `read` had read the pages of the first layer.
            vectors = read if read.dim else super().read(adapter, values)
            projected |= super().project(adapter, missing, vectors, queries, values)
        return projected

    def _from_pages(self, adapter: Reader, layer: int, values: Values | None) -> KeyValue | None:
        if values is None or not isinstance(adapter, AdapterLayers):
            return None

        def gather() -> KeyValue | None:
            version = self._versions.get(adapter.name)
            if version is None or not version.holds(weights(adapter).values()):
                return None
            if not self._unedited.holds(self.memory.tensors()):
                return None
            scores = self.memory.scores if adapter.score_bias else None
            return gather_pages(adapter, layer, self._tables, self._rows, scores)

        return cached(values, ("pages", layer), gather)

    def _slots(self, projected: KeyValue) -> Memory:
        """Return the mask and segments of the slots of keys and values, with vectors of width 0."""
        (b, n), m, device = self._rows.shape, projected.slots, projected.keys.device
        segments = torch.arange(n, device=device).repeat_interleave(m // max(n, 1)).expand(b, -1)
        return Memory(projected.keys.new_empty(b, m, 0), projected.mask, segments, check_finite=False)


def is_int(tensor: Tensor) -> bool:
    """Return True for a tensor of an integer dtype."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_hits(
    rows: Tensor, mask: Tensor | None, scores: Tensor | None, sources: Sequence[Sequence[object]] | None
) -> Tensor:
    """Return the hits (b, n) bool that are not missing; refuse arguments that do not fit the rows (b, n) int."""
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not is_int(rows):
        kind = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ShapeError(f"rows must be an int tensor (b, n), the entries of each request; got {kind}")
    b, n = rows.shape
    hits = torch.ones_like(rows, dtype=torch.bool) if mask is None else check_bool_mask("mask", mask)
    for what, shape in (("mask", hits.shape), ("scores", rows.shape if scores is None else scores.shape)):
        if shape != rows.shape:
            raise ShapeError(f"{what} must be (b, n) = {(b, n)} as the rows are, got {tuple(shape)}")
    if sources is not None and [len(row) for row in sources] != [n] * b:
        raise ShapeError(f"sources need one entry per hit, {b} rows of {n}; got {[len(row) for row in sources]}")
    return hits


class Bank:
    """Entries with the keys and values that the adapters of a host project of them: `model.bank`, `model.load_bank`.

    Entries have row numbers, counted from 0, that never change. A request sees entries as they were when it gathered
    them. Each change copies the tables, so change many entries at a time. A bank may be used by several threads.

    Args:
        model: the adapted model.
        versions: for each adapter with pages, the state of the weights that computed them.
        dtype: of the pages; None for that of the weights.
        tables: as in `mmattn.kv_store.pages`.

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
        self, model: AdaptedModel, versions: Mapping[str, TensorVersion], dtype: torch.dtype | None, tables: Tables
    ) -> None:
        self.model, self._dtype = model, dtype
        #: The weights and what they computed: one version, which a change replaces.
        self._state = versions, tables
        self._writing = threading.Lock()

    @classmethod
    @without_graph()
    def from_memory(cls, model: AdaptedModel, memory: Memory | Tensor, dtype: torch.dtype | None = None) -> Bank:
        """Build a bank of every row of a memory (n, m, e), for the active adapters; see `model.bank`."""
        check_dtype(dtype)
        memory = check_entries(memory)
        versions = weight_versions(model, model.active, memory.dim)
        tokens, mask = pad(memory.tokens, (0, 0, 0, 0, 1, 0)), pad(memory.real_slots(), (0, 0, 1, 0))
        tables = page_tables(model, versions, dtype, tokens, mask)
        tables["present"][0] = False
        return cls(model, versions, dtype, tables)

    @property
    def _tables(self) -> Tables:
        return self._state[1]

    def __len__(self) -> int:
        """Number of rows, removed ones included."""
        return len(self._tables["present"]) - 1

    @property
    def slots(self) -> int:
        """Number of slots m of every entry."""
        return self._tables["tokens"].shape[1]

    def nbytes(self) -> int:
        """Bytes of all tables, in memory or in the file they are mapped from."""
        return sum(table.nbytes for table in self._tables.values())

    def page_nbytes(self) -> int:
        """Bytes of keys and values alone, scales included."""
        versions, tables = self._state
        entries = ("tokens", "mask", "present", *(f"{name}.mask" for name in versions))
        return sum(table.nbytes for name, table in tables.items() if name not in entries)

    def __repr__(self) -> str:
        return f"Bank({len(self):,} rows, m={self.slots}, adapters={list(self._state[0])}, {self.nbytes():,} bytes)"

    # Requests ----------------------------------------------------------------------------------------------------

    def gather(
        self,
        rows: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[object]] | None = None,
    ) -> PreparedMemory:
        """Return the entries of each request as a prepared memory, to be given as `memory`.

        Answers are those of `model.prepare(bank.memory(…))`, but keys and values are copied from the pages at their
        first use; later steps and beams use that copy. While gradients are needed, or once a weight has changed since,
        the tokens gathered here are projected as those of any memory are.

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
        versions, tables = self._state
        check_versions(self.model, versions, len(self))
        memory, table_rows = _take(tables, rows, mask, scores, sources)
        for name in versions:
            self.model.adapter(name).check_memory(memory)
        return GatheredMemory(memory, versions, tables, table_rows)

    def memory(
        self,
        rows: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[object]] | None = None,
    ) -> Memory:
        """Return the entries of each request as a memory (b, n·m, e), each hit a segment: for training or other hosts.

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
        return _take(self._tables, rows, mask, scores, sources)[0]

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
            memory, count = self._check_entries(memory), len(self)
            if memory.batch:
                new = self._pages_of(memory)
                self._replace({name: torch.cat([table, new[name]]) for name, table in self._tables.items()})
            return torch.arange(count, count + memory.batch)

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
            if memory.batch:
                new = self._pages_of(memory)
                tables = self._tables.items()
                self._replace({name: table.index_copy(0, table_rows, new[name]) for name, table in tables})

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
            self._replace({name: table.index_fill(0, table_rows, 0) for name, table in self._tables.items()})

    @without_graph()
    def refresh(self) -> None:
        """Compute all pages again, with the current weights and for the adapters that are active now.

        Raises:
            ConditionError: no adapter is active.
            ShapeError: an active adapter reads entries of another width.
        """
        with self._writing:
            old = self._tables
            versions = weight_versions(self.model, self.model.active, old["tokens"].shape[2])
            tables = page_tables(self.model, versions, self._dtype, old["tokens"], old["mask"])
            self._state = versions, tables | {"present": old["present"]}

    def _replace(self, tables: Tables) -> None:
        self._state = self._state[0], tables

    def _check_entries(self, memory: Memory | Tensor) -> Memory:
        check_versions(self.model, self._state[0], len(self))
        return check_entries(memory, like=self._tables["tokens"])

    def _pages_of(self, memory: Memory) -> dict[str, Tensor]:
        """Return the tables of new entries."""
        tokens, mask = memory.tokens.to(self._tables["tokens"]), memory.real_slots()
        return page_tables(self.model, self._state[0], self._dtype, tokens, mask.to(tokens.device))

    def _table_rows(self, rows: Tensor | Sequence[int]) -> Tensor:
        """Return the rows of the tables that hold these entries."""
        numbers = torch.as_tensor(rows)
        numbers = numbers.long() if not numbers.numel() else numbers
        if numbers.dim() != 1 or not is_int(numbers):
            raise ShapeError(f"rows must be ints (n,), got {numbers.dtype} {tuple(numbers.shape)}")
        wrong = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(wrong):
            raise IndexError(f"row {int(wrong[0])} was asked for, and this bank has rows 0 to {len(self) - 1}")
        if len(numbers.unique()) != len(numbers):
            raise ShapeError("rows names one row twice: give each row once")
        return numbers.to(self._tables["tokens"].device, torch.long) + 1

    # Files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the bank to one safetensors file, atomically; `model.load_bank` reads it.

        Args:
            path: the file.

        Raises:
            ConditionError: the weights have changed since the pages were computed.
            OSError: the folder is missing or not writable; the old file is unchanged.
        """
        with self._writing:
            versions, tables = self._state
            check_versions(self.model, versions, len(self))
            write_bank(path, self.model, versions, self._dtype, tables)

    @classmethod
    def load(cls, model: AdaptedModel, path: str | PathLike[str], mapped: bool = False) -> Bank:
        """Read the bank that `save` wrote; see `model.load_bank`."""
        names, dtype, tables = read_bank(path, model, mapped)
        versions = weight_versions(model, names, tables["tokens"].shape[2])
        return cls(model, versions, dtype, tables)


def check_entries(memory: Memory | Tensor, like: Tensor | None = None) -> Memory:
    """Return entries (n, m, e) as a memory; refuse them if keys and values cannot be cached entry by entry."""
    memory = Memory(memory, check_finite=False) if isinstance(memory, Tensor) else memory
    if not isinstance(memory, Memory):
        raise ShapeError(f"a bank takes a Memory or a tensor (n, m, e), a row for each entry; got {type(memory)}")
    if not memory.length:
        raise ShapeError(f"an entry of a bank needs at least one slot, got {tuple(memory.tokens.shape)}")
    if memory.scores is not None or memory.segments is not None:
        raise ShapeError("entries of a bank have no scores and no segments: a request gives scores, one for each hit")
    if memory.tokens.requires_grad:
        raise ConditionError("the entries need gradients, and a bank keeps none: detach() them first")
    memory.check_finite()
    if like is not None and memory.tokens.shape[1:] != like.shape[1:]:
        raise ShapeError(
            f"the entries of this bank are (n, {like.shape[1]}, {like.shape[2]}), got "
            f"{tuple(memory.tokens.shape)}: pad shorter ones and mask the rest"
        )
    return memory


@without_graph()
def _take(
    tables: Tables,
    rows: Tensor,
    mask: Tensor | None,
    scores: Tensor | None,
    sources: Sequence[Sequence[object]] | None,
) -> tuple[Memory, Tensor]:
    """Return the hits of each row as a memory (b, n·m, e), each a segment, and their rows (b, n) in the tables."""
    hits, device, count = check_hits(rows, mask, scores, sources), tables["tokens"].device, len(tables["present"]) - 1
    rows, hits = rows.to(device, torch.long), hits.to(device)
    table_rows = torch.where(hits & (rows >= 0) & (rows < count), rows + 1, 0)
    lost = hits & ~tables["present"][table_rows]
    if lost.any():
        request, hit = lost.nonzero()[0].tolist()
        raise IndexError(
            f"request {request} asks for row {int(rows[request, hit])}, which is not in this bank of {count} rows or "
            "was removed: search an index of the same entries, and mask missing hits (mask=rows >= 0)"
        )
    tokens, real = tables["tokens"][table_rows].flatten(1, 2), tables["mask"][table_rows].flatten(1)
    (b, n), m = rows.shape, tables["tokens"].shape[1]
    if scores is not None:
        # A missing hit's score may be anything.
        scores = torch.where(hits, scores.to(device), 0).repeat_interleave(m, 1)
        Memory(tokens[..., :0], scores=scores).check_finite()
    segments = torch.arange(n, device=device).repeat_interleave(m).expand(b, -1)
    repeated = None if sources is None else [[source for source in row for _ in range(m)] for row in sources]
    return Memory(tokens, real, segments, scores, repeated, check_finite=False), table_rows
