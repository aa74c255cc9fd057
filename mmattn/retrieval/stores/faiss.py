"""Approximate stores that search with faiss, in the memory of this process; scores are exact.

faiss receives vectors of the cosine at length 1, under the inner product.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, check_int, import_extra
from mmattn.retrieval.entries import read_entries, write_entries
from mmattn.retrieval.scoring import lengths_of
from mmattn.retrieval.stores import register_store
from mmattn.retrieval.stores.exact import ExactScan, InMemoryStore, Part, Structure, Version
from mmattn.storage.files import replacing

if TYPE_CHECKING:
    import numpy
    from faiss import Index as FaissIndex, IndexIVF, SearchParameters

_FILE = "engine.faiss"
#: A product quantiser learns nothing from fewer vectors, and each centre from at most so many.
_FEWEST, _PER_CENTRE = 1024, 64


class FaissStore(InMemoryStore, ABC):
    """Entries in memory with a faiss index over their vectors.

    Where a filter allows at most 1,024 entries, or four times k, all of them are compared.
    """

    #: The class of the index in faiss.
    index_class: ClassVar[str]
    #: Candidates for each result, and more of them for a search.
    candidates_taken: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, dim: int, metric: str, **settings: int | None) -> None:
        faiss()  # a missing library is named before anything is embedded
        super().__init__(dim, metric)
        self.settings = {name: value if value is None else check_int(name, value) for name, value in settings.items()}

    def build(self, vectors: Tensor) -> Structure:
        return FaissStructure(self, self._train(as_numpy(vectors, self.metric)))

    @abstractmethod
    def _train(self, vectors: numpy.ndarray) -> FaissIndex:
        """Return a faiss index over an array (n, e)."""

    @abstractmethod
    def parameters(self, index: FaissIndex, selector: object, count: int) -> SearchParameters:
        """Return the parameters of one search in faiss."""

    def save(self, folder: str) -> None:
        """Write the entries and the faiss index."""
        entries, parts = self.version.entries, self.version.parts
        if not parts or not isinstance(parts[0].structure, FaissStructure):
            return write_entries(folder, entries)
        with replacing(os.path.join(folder, _FILE)) as file:
            file.write(memoryview(faiss().serialize_index(parts[0].structure.index)))
        write_entries(folder, entries, rows=parts[0].rows)

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: int | None) -> InMemoryStore:
        """Return the store that `save` wrote; mapped, faiss reads from the disk what a search needs."""
        path = os.path.join(folder, _FILE)
        if not os.path.exists(path):
            return super().open(folder, dim, metric, mapped=mapped, **settings)
        store = cls(dim, metric, **settings)
        entries, tensors = read_entries(folder, dim, metric, mapped, more=("rows",))
        part = store._read_part(path, tensors["rows"], len(entries), mapped)
        store.version = Version.around(entries, metric, part, store.build)
        return store

    def _read_part(self, path: str, rows: Tensor, count: int, mapped: bool) -> Part:
        try:
            index = faiss().read_index(path, faiss().IO_FLAG_MMAP_IFC if mapped else 0)
        except RuntimeError as error:
            raise IndexFileError(f"cannot read {path!r}: faiss says {error}") from error
        if not isinstance(index, getattr(faiss(), self.index_class)) or index.metric_type != _metric(self.metric):
            raise IndexFileError(f"cannot read {path!r}: faiss built it for another store or metric")
        if rows.dtype != torch.int64 or rows.shape != (index.ntotal,) or index.d != self.dim:
            raise IndexFileError(f"cannot read {path!r}: it has {index.ntotal} vectors of width {index.d}, not {count}")
        alive = rows[rows >= 0]
        if not ((rows >= -1) & (rows < count)).all() or len(alive.unique()) != len(alive):
            raise IndexFileError(f"cannot read {path!r}: its vectors are not those of {count} entries")
        return Part(FaissStructure(self, index), rows)


class FaissStructure:
    """An immutable faiss index over vectors (n, e)."""

    exact = False

    def __init__(self, store: FaissStore, index: FaissIndex) -> None:
        self.store = store
        self.index = index

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Return rows (b, c) that are probably among the `count` best; -1 is none."""
        factor, more = self.store.candidates_taken
        width = min(len(self), factor * count + more)
        if not len(queries) or not width:
            return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        selector = None
        if allowed is not None:
            import numpy

            selector = faiss().IDSelectorBitmap(numpy.packbits(allowed.cpu().numpy(), bitorder="little"))
        parameters = self.store.parameters(self.index, selector, width)
        _, rows = self.index.search(as_numpy(queries, self.store.metric), width, params=parameters)
        return torch.from_numpy(rows).to(queries.device)


@register_store("hnsw")
class HNSWStore(FaissStore):
    """A graph of neighbours (arXiv 1603.09320): fast and nearly exact, 8 bytes per link.

    Args:
        links: neighbours of each entry.
        build_effort: candidates considered while the graph is built.
        search_effort: candidates considered in a search; more find more.

    Raises:
        ConfigError: a number is too small.
    """

    recall = 0.9
    index_class = "IndexHNSWFlat"

    def __init__(
        self, dim: int, metric: str, *, links: int = 32, build_effort: int = 128, search_effort: int = 128
    ) -> None:
        super().__init__(dim, metric, links=links, build_effort=build_effort, search_effort=search_effort)
        check_int("links", links, at_least=2)

    def _train(self, vectors: numpy.ndarray) -> FaissIndex:
        index = faiss().IndexHNSWFlat(self.dim, self.settings["links"], _metric(self.metric))
        index.hnsw.efConstruction = self.settings["build_effort"]
        index.add(vectors)
        return index

    def parameters(self, index: FaissIndex, selector: object, count: int) -> SearchParameters:
        return faiss().SearchParametersHNSW(sel=selector, efSearch=max(self.settings["search_effort"] or 0, count))


@register_store("ivf")
class IVFStore(FaissStore):
    """Lists of entries around centres; a search compares the lists of the nearest centres (Jégou et al. 2011).

    It finds more than "hnsw" for queries that are distributed unlike the entries, such as those of attention (arXiv
    2409.10516). Up to 1,024 entries are all compared.

    Args:
        lists: number of lists; by default 4 √n, with at least 39 entries each.
        visited: lists that a search visits; by default a 32nd, at least 32. More find more.

    Raises:
        ConfigError: a number below 1.
    """

    recall = 0.9
    index_class = "IndexIVFFlat"
    #: Least number of lists that a search visits by default, and of how many it visits one.
    visited_by_default: ClassVar[tuple[int, int]] = (32, 32)

    def __init__(self, dim: int, metric: str, *, lists: int | None = None, visited: int | None = None) -> None:
        super().__init__(dim, metric, lists=lists, visited=visited)

    def build(self, vectors: Tensor) -> Structure:
        return super().build(vectors) if len(vectors) >= _FEWEST else ExactScan(vectors, self.metric)

    def _train(self, vectors: numpy.ndarray) -> FaissIndex:
        lists = min(self.settings["lists"] or int(4 * math.sqrt(len(vectors))), len(vectors) // 39)
        index = self._empty(lists)
        # faiss prints advice about small trainings to stderr, on which nobody can act.
        index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, _PER_CENTRE
        index.train(vectors)
        index.add(vectors)
        least, share = self.visited_by_default
        index.nprobe = self.settings["visited"] or max(least, lists // share)
        return index

    def _empty(self, lists: int) -> IndexIVF:
        return faiss().index_factory(self.dim, f"IVF{lists},Flat", _metric(self.metric))

    def parameters(self, index: FaissIndex, selector: object, count: int) -> SearchParameters:
        # Without nprobe it would be one list, whatever the index says.
        return faiss().SearchParametersIVF(sel=selector, nprobe=faiss().extract_index_ivf(index).nprobe)


@register_store("ivfpq")
class IVFPQStore(IVFStore):
    """Lists that hold a few bytes of each entry (Jégou et al. 2011), for entries that do not fit into memory.

    Use it with `Index.load(..., mapped=True)`, which leaves the full vectors on the disk.

    Args:
        lists: number of lists; by default 4 √n, with at least 39 entries each.
        visited: lists that a search visits; by default an eighth, at least 8. More find more.
        bytes: bytes of each entry, a divisor of its width e; by default about e/4.

    Raises:
        ConfigError: a number below 1, or bytes that do not divide the width.
    """

    recall = 0.7
    index_class = "IndexIVFPQ"
    candidates_taken = (8, 64)  # bytes only approximate distances
    visited_by_default = (8, 8)

    def __init__(
        self, dim: int, metric: str, *, lists: int | None = None, visited: int | None = None, bytes: int | None = None
    ) -> None:
        super().__init__(dim, metric, lists=lists, visited=visited)
        self.settings = {**self.settings, "bytes": bytes}
        if bytes is not None and dim % check_int("bytes", bytes):
            raise ConfigError(f"IVFPQ needs bytes that divide the width of the vectors, got bytes={bytes}, width {dim}")

    def _empty(self, lists: int) -> IndexIVF:
        dim = self.dim
        size = self.settings["bytes"] or max(part for part in range(1, max(1, dim // 4) + 1) if dim % part == 0)
        index = faiss().index_factory(dim, f"IVF{lists},PQ{size}", _metric(self.metric))
        index.pq.cp.min_points_per_centroid = 1
        index.do_polysemous_training = False  # takes seconds, for a kind of search that is not used here
        return index


def faiss() -> ModuleType:
    """Return the library, or raise an error that names the extra."""
    return import_extra("faiss", "rag")


def _metric(metric: str) -> int:
    return faiss().METRIC_L2 if metric == "l2" else faiss().METRIC_INNER_PRODUCT


def as_numpy(vectors: Tensor, metric: str) -> numpy.ndarray:
    """Return vectors as faiss receives them."""
    vectors = vectors.detach()
    if metric == "cosine":
        vectors = (vectors / lengths_of(vectors)[:, None]).float()
    return vectors.cpu().contiguous().numpy()
