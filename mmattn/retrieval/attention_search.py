"""`IndexMemory`: all entries of an index as a memory that attention searches in each layer, bound to an adapter."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers, register_memory_type
from mmattn.adapters.projection import ProjectedView
from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import TextState
from mmattn.core.attention import AttentionOutput, Rule, attend_by_rule
from mmattn.core.projection import AttendableMemory, KeyValueProjection
from mmattn.core.split_attention import with_null_slot
from mmattn.errors import ConditionError, ShapeError, check_int
from mmattn.memory import Memory
from mmattn.retrieval.entries import Entries
from mmattn.retrieval.scoring import directions, score
from mmattn.retrieval.stores.exact import InMemoryStore, Version

_ROWS = 1 << 16
#: Numbers of candidates that are compared, and of slots that are attended to, at once.
_NUMBERS = 1 << 24


class IndexMemory:
    """All entries of an index as a memory of one slot each, made by `Index.as_memory`.

    In each layer and head the query of every token, mapped into the space of the entries, searches them, and the
    softmax runs over the `per_query` entries with the largest scores, and the null slot where the adapter has one
    (Unlimiformer, arXiv 2305.01625). The size normalisation of an adapter counts all entries.

    One search structure serves all layers and heads. It has the kind and settings of the index's store: "exact" finds
    the best for certain, "ivf", "hnsw" and "ivfpq" nearly. It is built at the first use, over the entries after the
    adapter's norm, and updated with the index. A call reads the entries of its beginning.

    Args:
        store: the entries.
        structures: the search structures of the index.
        per_query: how many entries each token attends to, in each layer and head.
        queries: (b, e), for adapters with score_bias the query of each row of text; the scores of all entries are added
            to the attention's. An approximate search always includes the entries of the best scores.

    Raises:
        ConfigError: `per_query` is below 1.
    """

    def __init__(
        self, store: InMemoryStore, structures: SearchStructures, per_query: int, queries: Tensor | None = None
    ) -> None:
        self.store, self.structures, self.dim = store, structures, store.dim
        self.per_query, self.queries = check_int("per_query", per_query), queries
        #: Rows of text that it has scores for; None without queries, where it fits any text.
        self.batch = None if queries is None else len(queries)
        self._best: tuple[Entries, Tensor] | None = None

    def entries(self, eps: float | None, scored: bool = False) -> IndexEntries:
        """Return the current entries, after a LayerNorm with this ε; `scored` adds the scores of the queries."""
        entries, version = self.structures.get(self.store, eps, scored)
        exact = all(part.structure.exact for part in version.parts)
        best = self._best_scores(entries) if scored and not exact else None
        return IndexEntries(entries, version, self.store.metric, self.queries, best)

    @torch.no_grad()
    def _best_scores(self, entries: Entries) -> Tensor:
        """Return the rows (b, c) of the entries with the best scores."""
        if self._best is None or self._best[0] is not entries:
            assert self.queries is not None
            blocks = entries.vectors.split(_ROWS)
            queries = self.queries.to(entries.vectors.device)
            fits = torch.cat([score(queries, block, self.store.metric) for block in blocks], 1)
            self._best = entries, fits.topk(min(self.per_query, len(entries))).indices
        return self._best[1]

    def __repr__(self) -> str:
        return f"IndexMemory({len(self.store)} entries, e={self.dim}, per_query={self.per_query})"


class SearchStructures:
    """The structures of an index that attention searches, built at the first use and updated with the index."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._structures: dict[tuple[float | None, bool], tuple[Entries, Version]] = {}

    def get(self, store: InMemoryStore, eps: float | None, scored: bool = False) -> tuple[Entries, Version]:
        """Return the current entries, and a version that finds them by inner products after a LayerNorm with this ε.

        The vectors of the version are (n, e), or (n, 2e) where scores lie beside.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            entries, last = store.version.entries, self._structures.get((eps, scored))
            if last is not None and last[0] is entries:
                return last
            vectors = _searched(entries.vectors, eps, store.metric, scored)
            normed = Entries(entries.ids, entries.texts, entries.metadata, vectors)
            build = type(store)(vectors.shape[1], "ip", **store.settings).build
            if last is not None and last[0].vectors.device == vectors.device:
                version = last[1].followed(normed, _moves(last[0], entries), build)
            else:
                version = Version.over(normed, "ip", build)
            self._structures[eps, scored] = entries, version
            return entries, version


@dataclass(frozen=True, eq=False)
class IndexEntries:
    """The entries of one version of an index, for adapters; `best` are rows (b, c) that a search must not miss."""

    current: Entries
    version: Version
    metric: str
    queries: Tensor | None
    best: Tensor | None = None

    def __len__(self) -> int:
        return len(self.current)

    def search(self, queries: Tensor, count: int, score_weight: float | None = None) -> Tensor:
        """Return the rows (b, n, count or fewer) of the entries with the largest inner products; -1 is none."""
        vectors = self.version.entries.vectors
        queries = queries.to(vectors.device, torch.float32)
        if score_weight is not None:
            assert self.queries is not None
            scored = self.queries.to(queries)
            scored = (directions(scored) if self.metric == "cosine" else scored) * score_weight
            scored = scored.repeat_interleave(len(queries) // len(scored), 0)
            queries = torch.cat([queries, scored[:, None].expand_as(queries)], 2)
        flat = queries.flatten(0, 1)
        rows = self.version.candidates(flat, count, None)
        if self.best is not None:
            best = self.best.repeat_interleave(len(flat) // len(self.best), 0)
            rows = torch.cat([rows, best.to(rows.device)], 1).sort(1).values
            rows[:, 1:].masked_fill_(rows[:, 1:] == rows[:, :-1], -1)
        if rows.shape[1] > count:
            step = max(1, _NUMBERS // (rows.shape[1] * vectors.shape[1]))
            blocks = zip(flat.split(step), rows.split(step), strict=True)
            rows = torch.cat([_best(block, vectors, candidates, count) for block, candidates in blocks])
        return rows.unflatten(0, queries.shape[:2])

    def slots(self, rows: Tensor) -> Tensor:
        """Return the vectors (n, e) of rows (n,)."""
        vectors = self.current.vectors
        return vectors[rows.to(vectors.device)] if len(self) else vectors.new_zeros(*rows.shape, vectors.shape[1])

    def scores(self, rows: Tensor) -> Tensor:
        """Return the scores (b, n) of rows (n,) for the query of each row of text."""
        assert self.queries is not None
        return score(self.queries.to(self.current.vectors.device), self.slots(rows), self.metric)

    def memory(self) -> Memory:
        """Return all entries as a memory of one row."""
        entries = self.current
        sources = [[{"id": name, "text": text} for name, text in zip(entries.ids, entries.texts, strict=True)]]
        return Memory(entries.vectors[None], sources=sources, check_finite=False)


def _best(queries: Tensor, vectors: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the candidates (b, c) with the `count` largest inner products in float32, as in attention."""
    # Tokens and heads find much the same: each vector is read once.
    different, places = rows.clamp(min=0).unique(return_inverse=True)
    fit = (queries @ vectors[different].T).gather(1, places).masked_fill(rows < 0, -torch.inf)
    return rows.gather(1, fit.topk(count).indices)


def _searched(vectors: Tensor, eps: float | None, metric: str, scored: bool) -> Tensor:
    """Return the vectors (n, e) after a LayerNorm, or (n, 2e) with the vectors of the scores beside them."""
    normed = vectors
    if eps is not None:
        blocks = vectors.split(_ROWS)
        normed = torch.cat([torch.nn.functional.layer_norm(block, block.shape[1:], eps=eps) for block in blocks])
    return torch.cat([normed, directions(vectors) if metric == "cosine" else vectors], 1) if scored else normed


def _moves(old: Entries, new: Entries) -> Tensor:
    """Return the new row (n,) of each old entry; -1 where it is gone or has another vector."""
    rows = torch.tensor([new.rows.get(name, -1) for name in old.ids], dtype=torch.long, device=old.vectors.device)
    if len(new):
        for part, vectors in zip(rows.split(_ROWS), old.vectors.split(_ROWS), strict=True):
            part.masked_fill_((new.vectors[part.clamp(min=0)] != vectors).any(1), -1)
    return rows


@dataclass(frozen=True)
class SearchedSlots(AttendableMemory):
    """The entries of an index; each query attends to those that a search finds for it.

    With a = q Wk the query of a head in the space of the entries M, its scores over all of them are a Mᵀ (Unlimiformer,
    arXiv 2305.01625, section 2.2).
    """

    entries: IndexEntries
    per_query: int
    read: Callable[[Memory], Memory]  # as the adapter reads a memory
    norm: nn.LayerNorm | None = None  # that the search structure has, but for its weight

    def attend(self, projection: KeyValueProjection, q: Tensor, return_weights: bool) -> AttentionOutput:
        """Return the attention of queries (b, h, l, k) over their top-k slots and the null slot."""
        b, h, length, _ = q.shape
        queries = projection.to_slots(q).flatten(1, 2)
        with torch.no_grad():
            rows = self._search(projection, queries.detach())
        step = max(1, _NUMBERS // max(1, b * rows.shape[2] * queries.shape[2]))
        parts = [
            self._attend(projection, some, places, return_weights)
            for some, places in zip(queries.split(step, 1), rows.split(step, 1), strict=True)
        ]
        output, total, *weights = (torch.cat(one, 1).unflatten(1, (h, length)) for one in zip(*parts, strict=True))
        output, visible = projection.from_slots(output), total != float("-inf")
        slots_total = self._beside_null_slot(projection, q, total)
        output, total = with_null_slot(projection, q, output, slots_total)
        result = AttentionOutput(output.masked_fill(~visible, 0), visible=visible)
        if return_weights:
            places = rows.unflatten(1, (h, length))
            share = (slots_total - total).exp().masked_fill(~visible, 0).to(weights[0].dtype)
            shown = (weights[0] * share).masked_fill(places < 0, 0)
            dense = shown.new_zeros(b, h, length, len(self.entries))
            result.weights = dense.scatter_add_(3, places.clamp(min=0), shown) if len(self.entries) else dense
        return result

    def _search(self, projection: KeyValueProjection, queries: Tensor) -> Tensor:
        """Return the rows (b, n, c) that queries (b, n, e) find; -1 is none."""
        scaled, weight = queries.float() * projection.scale, None
        if self.norm is not None:
            scaled = scaled * self.norm.weight.float()
        if projection.score_scale is not None:
            weight = float(projection.score_scale) / projection.score_std
        return self.entries.search(scaled, self.per_query, weight).to(queries.device)

    def _beside_null_slot(self, projection: KeyValueProjection, q: Tensor, total: Tensor) -> Tensor:
        """Return the log-sum-exp of the slots with the terms that only count beside a null slot."""
        if projection.null_key is None:
            return total
        if projection.k_proj.bias is not None:  # the same for all slots, but not for the null slot
            g, h = projection.num_kv_heads, projection.num_heads
            bias = projection.k_proj.bias.view(g, 1, -1).repeat_interleave(h // g, 0)
            total = total + (q * bias).sum(-1, keepdim=True).to(total.dtype) * projection.scale
        if projection.length_norm is not None:
            total = total + math.log(projection.length_norm) - math.log(max(len(self.entries), 1))
        return total

    def _attend(
        self, projection: KeyValueProjection, queries: Tensor, rows: Tensor, return_weights: bool
    ) -> tuple[Tensor, ...]:
        """Return output (b, n, e), log-sum-exp and weights (b, n, c) of queries (b, n, e) over slots (b, n, c)."""
        b, n, e = queries.shape
        real = rows >= 0
        # Tokens and heads find much the same: each slot is read once.
        different, places = rows.clamp(min=0).unique(return_inverse=True)
        memory = self.read(Memory(self.entries.slots(different)[None], check_finite=False))
        slots = projection.cast(memory.tokens[0])[places].reshape(b * n, 1, rows.shape[2], e)
        bias = None
        if projection.score_scale is not None:
            scores = self.entries.scores(different).to(rows.device)
            scores = scores.repeat_interleave(b // len(scores), 0).gather(1, places.flatten(1)).view(places.shape)
            bias = projection.score_bias(scores, real)
            bias = None if bias is None else bias.reshape(b * n, 1, 1, rows.shape[2])
        rule = Rule(real.reshape(b * n, 1, 1, rows.shape[2]), bias)
        options = projection.options(return_weights, return_log_sum_exp=True)
        result = attend_by_rule(queries.reshape(b * n, 1, 1, e), slots, slots, rule, options)
        parts = (result.output, result.log_sum_exp, result.weights)
        return tuple(one.reshape(b, n, one.shape[3]) for one in parts if one is not None)


class BoundSearch(BoundMemory):
    """An index bound to the adapter that searches it; the whole call attends to the entries of one moment."""

    def __init__(self, memory: IndexMemory, adapter: AdapterLayers) -> None:
        norm = adapter.slot_norm()
        self.adapter, self.per_query, self.rows = adapter, memory.per_query, memory.batch
        self.name, self.shared = adapter.name, memory
        self.entries = memory.entries(None if norm is None else norm.eps, adapter.score_bias)

    def step(self, text: TextState) -> ProjectedView:
        """Return what the tokens of one forward find, `per_query` entries for each token, layer and head."""
        self.check_rows(text)
        if torch.compiler.is_compiling():
            raise ConditionError("an index is searched outside of a compiled graph: call the host as it is")
        has_memory = None
        if not len(self.entries):
            has_memory = torch.zeros(text.rows, 1, 1, dtype=torch.bool, device=self.adapter.weight.device)
        layers = self.adapter.layers if text.layer is None else (text.layer,)
        slots = SearchedSlots(self.entries, self.per_query, self.adapter.read, self.adapter.slot_norm())
        return ProjectedView(dict.fromkeys(layers, slots), has_memory=has_memory)

    def as_memory(self, text: TextState) -> Memory:
        memory = self.entries.memory().expand(text.rows if self.rows is None else self.rows)
        if not self.adapter.score_bias:
            return memory
        scores = self.entries.scores(torch.arange(memory.length))
        return Memory(memory.tokens, scores=scores, sources=memory.sources, check_finite=False)


def bind_index(memory: IndexMemory, adapter: AdapterLayers, host: nn.Module) -> BoundSearch:
    """Bind an index to an adapter."""
    adapter.check_parts("memory that is searched", "a Memory, such as hits.memory() of a search")
    adapter.slot_norm()
    if memory.dim != adapter.config.memory_dim:
        adapter.check_memory(Memory(torch.zeros(1, 1, memory.dim), check_finite=False))
    if not all(getattr(adapter.kv_projection(layer), "is_linear", False) for layer in adapter.layers):
        raise ConditionError(
            f"the keys of adapter {adapter.name!r} are normalised or rotated (qk_norm), so no search finds the largest "
            "scores: give hits.memory() of a search, or train without qk_norm"
        )
    if adapter.score_bias and memory.batch is None:
        raise ShapeError(
            f"adapter {adapter.name!r} was made with score_bias=True and weighs entries by how well they fit a query: "
            "give one for each row of text, index.as_memory(queries=...)"
        )
    return BoundSearch(memory, adapter)


register_memory_type(IndexMemory, bind_index)
