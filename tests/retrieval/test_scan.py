"""The scan misses nothing: its candidates contain what a comparison of everything in float64 finds."""

from __future__ import annotations

import pytest
import torch

from mmattn import Index
from mmattn.retrieval.scoring import best_rows
from mmattn.retrieval.stores.scan import ExactScan, error_of_product, scan_dtype
from tests.retrieval.searching import METRICS

#: Indexes of sizes at which the scan is in bfloat16 take seconds to make.
SOME_METRICS = ["cosine", *(pytest.param(metric, marks=pytest.mark.slow) for metric in METRICS if metric != "cosine")]


def truth(queries: torch.Tensor, vectors: torch.Tensor, metric: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and scores by comparing everything in float64; equal ones (in float32) in their order."""
    q, x = queries.double(), vectors.double()
    if metric == "l2":
        scores = torch.stack([-(x - one).square().sum(1) for one in q])
    else:
        if metric == "cosine":
            q, x = q / q.norm(dim=1, keepdim=True), x / x.norm(dim=1, keepdim=True)
        scores = torch.stack([(x * one).sum(1) for one in q])
    values, rows = scores.float().sort(dim=1, descending=True, stable=True)
    return rows[:, :count], values[:, :count]


def near_ties(n: int, e: int) -> torch.Tensor:
    """Copies of one vector that differ in far less than bfloat16 can hold, and some twins."""
    vectors = torch.randn(e) + 1e-4 * torch.randn(n, e)
    vectors[n // 2 :: 7] = vectors[3]
    return vectors


def outliers(n: int, e: int) -> torch.Tensor:
    """Lengths over nine orders of magnitude."""
    return torch.randn(n, e) * 10 ** torch.linspace(-4, 5, n)[torch.randperm(n), None]


def crossed(n: int, e: int) -> torch.Tensor:
    """bfloat16 rounds most rows up and the true best ones down, in every one of their places."""
    vectors = torch.full((n, e), 1 + 2**-8 + 2**-20)
    vectors[:5, ::2] = 1 + 2**-8 - 2**-20
    vectors[:5, 1::2] = 1 + 2**-7
    return vectors[torch.randperm(n)]


CORPORA = {
    "plain": lambda n, e: torch.randn(n, e),
    "near ties": near_ties,
    "outliers": outliers,
    "crossed": crossed,
    "tiny": lambda n, e: 1e-17 * torch.randn(n, e),
    "huge": lambda n, e: 1e13 * torch.randn(n, e),
    "all the same": lambda n, e: torch.randn(1, e).expand(n, e),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("corpus", CORPORA)
def test_equals_comparing_everything(corpus: str, metric: str, dtype: torch.dtype) -> None:
    vectors = CORPORA[corpus](1511, 67)
    scan = ExactScan(vectors, metric, dtype)
    near = vectors[:7] * 1.01 + 0.003 * vectors[:7].norm(dim=1, keepdim=True) / 8 * torch.randn(7, 67)
    for queries in (near, near[:1], 3000 * near, torch.ones(2, 67)):
        expected, _ = truth(queries, vectors, metric, 11)
        assert torch.equal(best_rows(queries, vectors, scan.candidates(queries, 11), metric, 11), expected)
        allowed = torch.rand(1511) < 0.1
        rows = best_rows(queries, vectors, scan.candidates(queries, 11, allowed), metric, 11)
        expected, _ = truth(queries, vectors[allowed], metric, 11)
        assert torch.equal(rows, allowed.nonzero()[:, 0][expected])


@pytest.fixture
def quick_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of which bfloat16 is expected to be faster: where this one is not, the answers are the same."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.mark.parametrize("metric", SOME_METRICS)
def test_through_the_front_door_where_bfloat16_scans(metric: str, quick_bfloat16: None) -> None:
    vectors = near_ties(50_707, 331)
    assert scan_dtype(vectors) == torch.bfloat16 and scan_dtype(vectors[:100]) == torch.float32
    queries = vectors[:5] + 1e-3 * torch.randn(5, 331)
    rows, scores = truth(queries, vectors, metric, 13)
    hits = Index.build(vectors, metric=metric).search(queries, 13)
    assert hits.ids == rows.tolist()
    assert torch.equal(hits.scores, scores)


def opposed(n: int, near: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query (1, e) and vectors (n, e) of length 1, `near` of which fit it equally well but for 1e-6.

    bfloat16 rounds all places of such a vector in one direction and nearly as far as it can, each vector in another:
    the scan finds them as far apart as its error allows, in any order. The last places bring each to length 1, in
    numbers that bfloat16 holds.
    """
    query = torch.cat([torch.full((64,), 2.0**-3), torch.zeros(8)])
    grid, total = 2.0**-10, 60 * 132 + 7
    steps = total + torch.randint(-29, 30, (n,))
    places = steps[:, None] // 60 + (torch.rand(n, 60).argsort(1) < steps[:, None] % 60)
    vectors = grid * (places + (total - steps)[:, None].double() / 60) + 1e-7 * torch.rand(n, 1)
    vectors[torch.rand(n).argsort() >= near] *= 0.5
    rest = 1 - vectors.float().double().square().sum(1)
    parts = [vectors.float(), torch.zeros(n, 4)]
    for _ in range(8):
        parts.append((rest.clamp(min=0).sqrt() * (1 - 2**-8)).bfloat16().float()[:, None])
        rest = rest - parts[-1][:, 0].double().square()
    return query[None], torch.cat(parts, 1)


@pytest.mark.parametrize("filtered", [False, True], ids=["all", "filtered"])
@pytest.mark.parametrize("near", [20, 31, 400], ids=lambda near: f"{near} near")
@pytest.mark.parametrize("metric", METRICS)
def test_the_best_among_entries_closer_than_the_rounding(metric: str, near: int, filtered: bool) -> None:
    for _ in range(40):
        query, vectors = opposed(503, near)
        allowed = torch.rand(503) < 0.7 if filtered else torch.ones(503, dtype=torch.bool)
        scan = ExactScan(vectors, metric, torch.bfloat16)
        for count in (1, 3):
            rows = best_rows(
                query, vectors, scan.candidates(query, count, allowed if filtered else None), metric, count
            )
            expected, _ = truth(query, vectors[allowed], metric, count)
            assert torch.equal(rows, allowed.nonzero()[:, 0][expected])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [1.0, 1e18, 1e-30])
def test_what_is_not_allowed_is_no_candidate(metric: str, dtype: torch.dtype, length: float) -> None:
    """Among zeros, underflows and equal vectors the bounds exclude nothing; the filter does."""
    zeros = torch.zeros(13, 5) if metric != "cosine" else torch.full((13, 5), 1e-40)
    for vectors in (zeros, torch.full((13, 5), 1e-20), torch.ones(13, 5)):
        allowed = torch.arange(13) % 3 == 1
        for count in (1, 3, 20):
            found = ExactScan(vectors, metric, dtype).candidates(length * torch.ones(2, 5), count, allowed)
            for line in found.tolist():
                assert min(count, 4) <= len([row for row in line if row >= 0]) <= 4
                assert {row for row in line if row >= 0} <= {1, 4, 7, 10}


def test_the_bound_holds_where_all_roundings_agree() -> None:
    """Every place of both vectors is 1/√e, which some widths round by nearly 2**-8, all in one direction."""
    places = torch.arange(2, 1500).double().rsqrt()
    worst = (places.bfloat16() / places - 1).abs().argsort(descending=True)[:40] + 2
    for e in worst.tolist():
        scan = ExactScan(torch.ones(1, e), "cosine", torch.bfloat16)
        slack = 2 * float(scan.errors[0]) + error_of_product(torch.bfloat16, e)
        assert abs(float(scan.scan @ scan.scan.T) - 1) <= 1.01 * slack, e


def test_few_candidates_where_few_are_near() -> None:
    """The scan decides nearly everything; that it never errs does not come from looking at all."""
    vectors = torch.randn(5003, 211)
    found = ExactScan(vectors, "cosine", torch.bfloat16).candidates(torch.randn(7, 211), 5)
    assert 5 <= found.shape[1] < 200


def test_coarse_products_of_float32_change_nothing() -> None:
    """Under "medium" a product of float32 matrices may round its factors to bfloat16."""
    vectors = near_ties(1511, 67)
    scan = ExactScan(vectors, "ip", torch.float32)
    queries = vectors[:7] + 1e-4 * torch.randn(7, 67)
    fine = scan.candidates(queries, 11)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        coarse = scan.candidates(queries, 11)
    finally:
        torch.set_float32_matmul_precision(before)
    assert coarse.shape[1] > fine.shape[1]
    assert torch.equal(best_rows(queries, vectors, coarse, "ip", 11), truth(queries, vectors, "ip", 11)[0])
