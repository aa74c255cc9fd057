"""Stores that search with faiss, in the memory of this process. Scores are the true ones: only who is found is not.

Vectors of the cosine are given to faiss normalised, under the inner product.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError, check_int, import_extra
from mmattn.retrieval.scoring import lengths_of
from mmattn.retrieval.stores.bounded_scan import BoundedScan
from mmattn.retrieval.stores.entry_files import read_entries, write_entries
from mmattn.retrieval.stores.exact import InMemoryStore, Part, Structure, Version
from mmattn.retrieval.stores.registry import register_store
from mmattn.storage.files import replacing

_FILE = "engine.faiss"
#: Fewer vectors than this teach a product quantiser nothing.
_ENOUGH = 1024
#: Vectors that each centre of the lists is learned from, at most.
_EACH = 64


class FaissStore(InMemoryStore, ABC):
    """Entries in memory with a faiss index over their vectors.

    Up to 1,024 entries that a filter allows, or four times k, all of them are compared.
    """

    #: Whether it compares every entry.
    exact: ClassVar[bool] = False
    #: The class of its index in faiss.
    index_class: ClassVar[str]

    def __init__(self, dim: int, metric: str) -> None:
        faiss()  # missing, it is named before anything is embedded for it
        super().__init__(dim, metric)

    def build(self, vectors: Tensor) -> Structure:
        """The faiss index over vectors (n, e)."""
        return FaissStructure(self, self.trained(vectors))

    @abstractmethod
    def trained(self, vectors: Tensor) -> Any:
        """The faiss index itself."""

    @abstractmethod
    def parameters(self, index: Any, selector: Any, count: int) -> Any:
        """The parameters of one search in faiss.

        Args:
            index: what `trained` gave, or what was read from its file.
            selector: which rows may be found.
            count: how many are wanted.
        """

    def width(self, count: int) -> int:
        """How many candidates to take for `count` results: as many where faiss compares the vectors themselves."""
        return count

    def save(self, folder: str) -> None:
        """Write the entries and what faiss has built."""
        entries, parts = self.version.entries, self.version.parts
        if not parts or not isinstance(parts[0].structure, FaissStructure):
            return write_entries(folder, entries)
        with replacing(os.path.join(folder, _FILE)) as file:
            file.write(memoryview(faiss().serialize_index(parts[0].structure.index)))
        write_entries(folder, entries, rows=parts[0].rows)

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> FaissStore:
        """The store with what `save` wrote; mapped, faiss reads what it built where a search looks."""
        store = cls(dim, metric, **settings)
        entries, tensors = read_entries(folder, dim, metric, mapped)
        path = os.path.join(folder, _FILE)
        if not os.path.exists(path) and not tensors:
            store.version = Version.over(entries, metric, store.build)
        else:
            part = store._part(path, tensors, len(entries), mapped)
            store.version = Version.around(entries, metric, part, store.build)
        return store

    def _part(self, path: str, tensors: dict[str, Tensor], count: int, mapped: bool) -> Part:
        try:
            index = faiss().read_index(path, faiss().IO_FLAG_MMAP_IFC if mapped else 0)
        except RuntimeError as error:
            raise IndexFileError(f"cannot read {path!r}: faiss says {error}") from error
        rows = tensors.get("rows")
        if (
            rows is None
            or set(tensors) != {"rows"}
            or rows.dtype != torch.int64
            or rows.shape != (index.ntotal,)
            or index.d != self.dim
        ):
            raise IndexFileError(
                f"cannot read {path!r}: it knows {index.ntotal} vectors of width {index.d}, and other ones were saved"
            )
        alive = rows[rows >= 0]
        if not ((rows >= -1) & (rows < count)).all() or len(alive.unique()) != len(alive):
            raise IndexFileError(f"cannot read {path!r}: its vectors are not those of {count} entries")
        same = isinstance(index, getattr(faiss(), self.index_class))
        if not same or index.metric_type != _faiss_metric(self.metric):
            raise IndexFileError(f"cannot read {path!r}: faiss built it for another store or metric")
        return Part(FaissStructure(self, index), rows)


class FaissStructure:
    """A faiss index over vectors (n, e), never changed after it was built."""

    def __init__(self, store: FaissStore, index: Any) -> None:
        self.store = store
        self.index = index
        self.exact = store.exact

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Rows (b, c) that are probably among the `count` best; -1 is none."""
        width = min(len(self), self.store.width(count))
        if not len(queries) or not width:
            return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        selector = None
        if allowed is not None:
            import numpy

            selector = faiss().IDSelectorBitmap(numpy.packbits(allowed.cpu().numpy(), bitorder="little"))
        parameters = self.store.parameters(self.index, selector, width)
        _, rows = self.index.search(_numpy(queries, self.store.metric), width, params=parameters)
        return torch.from_numpy(rows).to(queries.device)


@register_store("flat")
class FlatStore(FaissStore):
    """faiss's own comparison of every entry in float32: exact but for near ties within its rounding."""

    recall = 0.99
    exact = True
    index_class = "IndexFlat"

    def trained(self, vectors: Tensor) -> Any:
        """The faiss index itself."""
        index = faiss().IndexFlat(self.dim, _faiss_metric(self.metric))
        index.add(_numpy(vectors, self.metric))
        return index

    def parameters(self, index: Any, selector: Any, count: int) -> Any:
        """The parameters of one search in faiss."""
        return faiss().SearchParameters(sel=selector)

    def width(self, count: int) -> int:
        """How many candidates to take for `count` results."""
        return 4 * count + 32


@register_store("hnsw")
class HNSWStore(FaissStore):
    """A graph in which each entry knows its neighbours (arXiv 1603.09320): quick and near to exact, 8 bytes per link.

    Args:
        dim: width e of the vectors.
        metric: how they are compared.
        links: neighbours of each entry.
        build_effort: candidates considered while the graph is built.
        search_effort: candidates considered while it is searched; more find more.

    Raises:
        ConfigError: a number that is too small.
    """

    recall = 0.9
    index_class = "IndexHNSWFlat"

    def __init__(
        self, dim: int, metric: str, *, links: int = 32, build_effort: int = 128, search_effort: int = 128
    ) -> None:
        self.links = check_int("links", links, at_least=2)
        self.build_effort = check_int("build_effort", build_effort)
        self.search_effort = check_int("search_effort", search_effort)
        super().__init__(dim, metric)

    @property
    def settings(self) -> dict[str, Any]:
        """Links and efforts."""
        return {"links": self.links, "build_effort": self.build_effort, "search_effort": self.search_effort}

    def trained(self, vectors: Tensor) -> Any:
        """The faiss index itself."""
        index = faiss().IndexHNSWFlat(self.dim, self.links, _faiss_metric(self.metric))
        index.hnsw.efConstruction = self.build_effort
        index.add(_numpy(vectors, self.metric))
        return index

    def parameters(self, index: Any, selector: Any, count: int) -> Any:
        """The parameters of one search in faiss."""
        return faiss().SearchParametersHNSW(sel=selector, efSearch=max(self.search_effort, count))


@register_store("ivf")
class IVFStore(FaissStore):
    """Entries in lists around centres; a search compares those of the lists whose centres fit best (Jégou et al. 2011).

    It finds more than "hnsw" for queries that do not lie where entries lie, as those of attention (arXiv 2409.10516).
    Below 1,024 entries there is too little to learn centres from, and all are compared.

    Args:
        dim: width e of the vectors.
        metric: how they are compared.
        lists: how many; by default 4 √n, but 39 entries in each.
        visited: how many a search visits; by default a 32nd, at least 32. More find more.

    Raises:
        ConfigError: a number below 1.
    """

    recall = 0.9
    index_class = "IndexIVFFlat"

    def __init__(self, dim: int, metric: str, *, lists: int | None = None, visited: int | None = None) -> None:
        self.lists = None if lists is None else check_int("lists", lists)
        self.visited = None if visited is None else check_int("visited", visited)
        super().__init__(dim, metric)

    @property
    def settings(self) -> dict[str, Any]:
        """Lists, and those visited."""
        return {"lists": self.lists, "visited": self.visited}

    def build(self, vectors: Tensor) -> Structure:
        """The faiss index over vectors (n, e), or the scan where there is too little to learn from."""
        return super().build(vectors) if len(vectors) >= _ENOUGH else BoundedScan(vectors, self.metric)

    def trained(self, vectors: Tensor) -> Any:
        """The faiss index itself."""
        count, dim = vectors.shape
        lists = min(self.lists or int(4 * math.sqrt(count)), count // 39)
        index = self.empty(lists)
        # faiss prints advice about small trainings to stderr, which is nothing a caller could act upon.
        index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, _EACH
        values = _numpy(vectors, self.metric)
        index.train(values)
        index.add(values)
        index.nprobe = self.visited or self.visited_of(lists)
        return index

    def empty(self, lists: int) -> Any:
        """An index in faiss that has learned nothing yet."""
        return faiss().index_factory(self.dim, f"IVF{lists},Flat", _faiss_metric(self.metric))

    def visited_of(self, lists: int) -> int:
        """How many of so many lists a search visits where nobody said."""
        return max(32, lists // 32)

    def parameters(self, index: Any, selector: Any, count: int) -> Any:
        """The parameters of one search in faiss."""
        # Left out, it would be one list, whatever the index says.
        return faiss().SearchParametersIVF(sel=selector, nprobe=index.nprobe)


@register_store("ivfpq")
class IVFPQStore(IVFStore):
    """As "ivf", with a few bytes of each entry in its list (Jégou et al. 2011): for what does not fit into memory.

    Use it with `Index.load(..., mapped=True)`, which leaves the full vectors on the disk.

    Args:
        dim: width e of the vectors.
        metric: how they are compared.
        lists: how many; by default 4 √n, but 39 entries in each.
        visited: how many a search visits; by default an eighth, at least 8. More find more.
        bytes: of each entry, a divisor of its width e; by default about e/4.

    Raises:
        ConfigError: a number below 1, or bytes that do not divide the width.
    """

    recall = 0.7
    index_class = "IndexIVFPQ"

    def __init__(
        self,
        dim: int,
        metric: str,
        *,
        lists: int | None = None,
        visited: int | None = None,
        bytes: int | None = None,
    ) -> None:
        self.bytes = None if bytes is None else check_int("bytes", bytes)
        if bytes is not None and dim % bytes:
            raise ConfigError(f"IVFPQ needs bytes that divide the width of the vectors, got bytes={bytes}, width {dim}")
        super().__init__(dim, metric, lists=lists, visited=visited)

    @property
    def settings(self) -> dict[str, Any]:
        """Lists, those visited, and bytes."""
        return super().settings | {"bytes": self.bytes}

    def empty(self, lists: int) -> Any:
        """An index in faiss that has learned nothing yet."""
        dim = self.dim
        size = self.bytes or max(part for part in range(1, max(1, dim // 4) + 1) if dim % part == 0)
        index = faiss().index_factory(dim, f"IVF{lists},PQ{size}", _faiss_metric(self.metric))
        index.pq.cp.min_points_per_centroid = 1
        index.do_polysemous_training = False  # seconds, for a kind of search that is not used here
        return index

    def visited_of(self, lists: int) -> int:
        """How many of so many lists a search visits where nobody said."""
        return max(8, lists // 8)

    def width(self, count: int) -> int:
        """How many candidates to take for `count` results."""
        return 8 * count + 64


def faiss() -> Any:
    """The library, or a message which extra brings it."""
    return import_extra("faiss", "rag")


def _faiss_metric(metric: str) -> Any:
    return faiss().METRIC_L2 if metric == "l2" else faiss().METRIC_INNER_PRODUCT


def _numpy(vectors: Tensor, metric: str) -> Any:
    vectors = vectors.detach()
    if metric == "cosine":
        vectors = (vectors / lengths_of(vectors)[:, None]).float()
    return vectors.cpu().contiguous().numpy()
