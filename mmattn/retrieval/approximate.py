"""The engines of faiss. They propose entries; the scores are always the true ones, so only who is found is approximate.

Vectors of the cosine are given to faiss normalised, under the inner product.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, check_int, import_extra
from mmattn.retrieval.exact import Exact
from mmattn.retrieval.state import Engine, EngineMaker
from mmattn.retrieval.vectors import lengths_of
from mmattn.storage.atomic import Path

#: Fewer vectors than this teach a product quantiser nothing.
_ENOUGH = 1024


@dataclass(frozen=True)
class Flat:
    """faiss's own comparison of every entry in float32: exact but for near-ties within its rounding."""

    def __call__(self, vectors: Tensor, metric: str) -> Engine:
        faiss = _faiss()
        index = faiss.IndexFlat(vectors.shape[1], _faiss_metric(metric))
        index.add(_numpy(vectors, metric))
        return FaissEngine(self, index, metric)

    def parameters(self, selector: Any, count: int) -> Any:
        """What a search is told: who may be found, and how much effort to make."""
        return _faiss().SearchParameters(sel=selector)

    def width(self, count: int) -> int:
        """How many candidates to take for `count` results."""
        return 4 * count + 32


@dataclass(frozen=True)
class HNSW:
    """A graph in which each entry knows its neighbours (arXiv 1603.09320): quick and near to exact, 8 bytes per link.

    Args:
        links: neighbours of each entry.
        build_effort: candidates kept while the graph is built.
        search_effort: candidates kept while it is searched; more find more.
    """

    links: int = 32
    build_effort: int = 128
    search_effort: int = 128

    def __post_init__(self) -> None:
        _check_settings(self, links=2)

    def __call__(self, vectors: Tensor, metric: str) -> Engine:
        index = _faiss().IndexHNSWFlat(vectors.shape[1], self.links, _faiss_metric(metric))
        index.hnsw.efConstruction = self.build_effort
        index.add(_numpy(vectors, metric))
        return FaissEngine(self, index, metric)

    def parameters(self, selector: Any, count: int) -> Any:
        """What a search is told: who may be found, and how much effort to make."""
        return _faiss().SearchParametersHNSW(sel=selector, efSearch=max(self.search_effort, count))

    def width(self, count: int) -> int:
        """How many candidates to take for `count` results."""
        return 2 * count + 32


@dataclass(frozen=True)
class IVFPQ:
    """Entries in lists around centres, a few bytes each (Jégou et al. 2011): for what does not fit into memory.

    Use it with `Index.load(..., mapped=True)`, which leaves the full vectors on the disk. Below 1,024 entries there is
    too little to learn the bytes from, and the exact engine takes its place.

    Args:
        lists: how many; by default 4 √n, but 39 entries in each.
        visited: how many a search visits; by default an eighth, at least 8. More find more.
        bytes: of each entry, a divisor of its width e; by default about e/4.
    """

    lists: int | None = None
    visited: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        _check_settings(self)

    def __call__(self, vectors: Tensor, metric: str) -> Engine:
        count, dim = vectors.shape
        size = self.bytes or max(part for part in range(1, max(1, dim // 4) + 1) if dim % part == 0)
        if dim % size:
            raise ConfigError(f"IVFPQ needs bytes that divide the width of the vectors, got bytes={size}, width {dim}")
        if count < _ENOUGH:
            return Exact(vectors, metric)
        lists = min(self.lists or int(4 * math.sqrt(count)), count // 39)
        faiss = _faiss()
        index = faiss.index_factory(dim, f"IVF{lists},PQ{size}", _faiss_metric(metric))
        # faiss prints advice about small trainings to stderr, which is nothing a caller could act upon.
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        index.do_polysemous_training = False  # seconds, for a kind of search that is not used here
        values = _numpy(vectors, metric)
        index.train(values)
        index.add(values)
        index.nprobe = self.visited or max(8, lists // 8)
        return FaissEngine(self, index, metric)

    def parameters(self, selector: Any, count: int) -> Any:
        """What a search is told: who may be found, and how much effort to make."""
        # Left alone, nprobe is read from the index, where building put it.
        return _faiss().SearchParametersIVF(sel=selector, **({} if self.visited is None else {"nprobe": self.visited}))

    def width(self, count: int) -> int:
        """How many candidates to take for `count` results."""
        return 8 * count + 64


class FaissEngine:
    """A faiss index over vectors (n, e), never changed after it was made."""

    def __init__(self, settings: Flat | HNSW | IVFPQ, index: Any, metric: str) -> None:
        self.settings = settings
        self.index = index
        self.metric = metric
        self.exact = isinstance(settings, Flat)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Rows (b, c) that are probably among the `count` best; -1 is none."""
        width = min(len(self), self.settings.width(count))
        if not len(queries) or not width:
            return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        selector = None
        if allowed is not None:
            import numpy

            selector = _faiss().IDSelectorBitmap(numpy.packbits(allowed.cpu().numpy(), bitorder="little"))
        parameters = self.settings.parameters(selector, width)
        _, rows = self.index.search(_numpy(queries, self.metric), width, params=parameters)
        return torch.from_numpy(rows).to(queries.device)

    def serialized(self) -> memoryview:
        """What `read_engine` reads from a file."""
        return memoryview(_faiss().serialize_index(self.index))


def read_engine(settings: Flat | HNSW | IVFPQ, path: Path, metric: str, mapped: bool) -> FaissEngine:
    """The engine in a file; mapped, it stays there and is read where a search looks."""
    faiss = _faiss()
    return FaissEngine(settings, faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0), metric)


KINDS: dict[str, type] = {"flat": Flat, "hnsw": HNSW, "ivfpq": IVFPQ}


def engine_maker(engine: object) -> EngineMaker:
    """What makes the engine that was asked for, by name or by settings.

    Raises:
        ConfigError: it is neither.
    """
    if engine == "exact":
        return Exact
    if isinstance(engine, str) and engine in KINDS:
        maker: EngineMaker = KINDS[engine]()
        return maker
    if isinstance(engine, (Flat, HNSW, IVFPQ)):
        return engine
    raise ConfigError(f"engine must be one of 'exact', {', '.join(map(repr, KINDS))} or their settings, got {engine!r}")


def describe_maker(maker: EngineMaker) -> dict[str, Any]:
    """The name and settings of an engine as JSON, which `described_maker` takes back."""
    if isinstance(maker, (Flat, HNSW, IVFPQ)):
        return {"kind": type(maker).__name__.lower(), **dataclasses.asdict(maker)}
    return {"kind": "exact"}


def described_maker(described: dict[str, Any]) -> EngineMaker:
    """What `describe_maker` described.

    Raises:
        ConfigError: an unknown kind, or settings it does not have.
    """
    kind, settings = described.get("kind"), {key: value for key, value in described.items() if key != "kind"}
    if kind == "exact" and not settings:
        return Exact
    if kind not in KINDS or set(settings) != {field.name for field in dataclasses.fields(KINDS[kind])}:
        raise ConfigError(f"there is no engine {described!r:.200} in this version")
    maker: EngineMaker = KINDS[kind](**settings)
    return maker


def _faiss() -> Any:
    return import_extra("faiss", "rag")


def _faiss_metric(metric: str) -> Any:
    faiss = _faiss()
    return faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT


def _numpy(vectors: Tensor, metric: str) -> Any:
    vectors = vectors.detach()
    if metric == "cosine":
        vectors = (vectors / lengths_of(vectors)[:, None]).float()
    return vectors.cpu().contiguous().numpy()


def _check_settings(settings: Any, **least: int) -> None:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None or field.default is not None:
            check_int(field.name, value, at_least=least.get(field.name, 1))
