"""The scan misses nothing: its candidates contain what a comparison of everything in float64 finds."""

from __future__ import annotations

import pytest
import torch

from mmattn.retrieval.scoring import best_rows
from mmattn.retrieval.stores.exact import ExactScan
from tests.retrieval.searching import METRICS


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
    """Copies of one vector that hardly differ, and some twins."""
    vectors = torch.randn(e) + 1e-4 * torch.randn(n, e)
    vectors[n // 2 :: 7] = vectors[3]
    return vectors


def outliers(n: int, e: int) -> torch.Tensor:
    """Lengths over nine orders of magnitude."""
    return torch.randn(n, e) * 10 ** torch.linspace(-4, 5, n)[torch.randperm(n), None]


CORPORA = {
    "plain": lambda n, e: torch.randn(n, e),
    "near ties": near_ties,
    "outliers": outliers,
    "tiny": lambda n, e: 1e-17 * torch.randn(n, e),
    "huge": lambda n, e: 1e13 * torch.randn(n, e),
    "all the same": lambda n, e: torch.randn(1, e).expand(n, e),
}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("corpus", CORPORA)
def test_equals_comparing_everything(corpus: str, metric: str) -> None:
    vectors = CORPORA[corpus](1511, 67)
    scan = ExactScan(vectors, metric)
    near = vectors[:7] * 1.01 + 0.003 * vectors[:7].norm(dim=1, keepdim=True) / 8 * torch.randn(7, 67)
    for queries in (near, near[:1], 3000 * near, torch.ones(2, 67)):
        expected, _ = truth(queries, vectors, metric, 11)
        assert torch.equal(best_rows(queries, vectors, scan.candidates(queries, 11), metric, 11), expected)
        allowed = torch.rand(1511) < 0.1
        rows = best_rows(queries, vectors, scan.candidates(queries, 11, allowed), metric, 11)
        expected, _ = truth(queries, vectors[allowed], metric, 11)
        assert torch.equal(rows, allowed.nonzero()[:, 0][expected])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("length", [1.0, 1e18, 1e-30])
def test_what_is_not_allowed_is_no_candidate(metric: str, length: float) -> None:
    """Invariant 83: among zeros, underflows and equal vectors the bounds exclude nothing; the filter does."""
    zeros = torch.zeros(13, 5) if metric != "cosine" else torch.full((13, 5), 1e-40)
    for vectors in (zeros, torch.full((13, 5), 1e-20), torch.ones(13, 5)):
        allowed = torch.arange(13) % 3 == 1
        for count in (1, 3, 20):
            found = ExactScan(vectors, metric).candidates(length * torch.ones(2, 5), count, allowed)
            for line in found.tolist():
                assert min(count, 4) <= len([row for row in line if row >= 0]) <= 4
                assert {row for row in line if row >= 0} <= {1, 4, 7, 10}


def test_few_candidates_where_few_are_near() -> None:
    """The scan decides nearly everything; that it never errs does not come from looking at all."""
    vectors = torch.randn(5003, 211)
    found = ExactScan(vectors, "cosine").candidates(torch.randn(7, 211), 5)
    assert 5 <= found.shape[1] < 20


def test_coarse_products_of_float32_change_nothing() -> None:
    """Under "medium" a product of float32 matrices may round its factors to bfloat16."""
    vectors = near_ties(1511, 67)
    scan = ExactScan(vectors, "ip")
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
