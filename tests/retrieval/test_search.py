"""Searches against the slow definition: every store and metric, filters, thresholds, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmattn import Memory
from mmattn.retrieval import Hits
from mmattn.retrieval.stores.exact import ExactScan
from tests.retrieval.searching import KINDS, METRICS, STORES, WIDTH, built, held, reference, small


def agree(hits: Hits, queries: torch.Tensor, vectors: dict[Any, Any], metric: str) -> None:
    ids, scores = reference(queries, vectors, hits.scores.shape[1], metric)
    assert hits.ids == ids
    assert hits.mask.tolist() == [[name is not None for name in row] for row in ids]
    torch.testing.assert_close(hits.scores, torch.tensor(scores), rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("store", [*STORES, "qdrant"])
class TestEveryEngine:
    def test_scores_that_round_to_the_same_are_in_the_order_of_adding(self, store: str, metric: str) -> None:
        """Invariant 179. The second entry fits better, by less than float32 can say."""
        axes = torch.eye(WIDTH)
        query = 3 * axes[0] + (axes[3] if metric == "ip" else 0)
        alike = torch.stack(
            [axes[0], axes[0] + 1e-9 * axes[3]] if metric == "ip" else [axes[0] + 1e-6 * axes[3], axes[0]]
        )
        index = built(torch.cat([alike, torch.randn(31, WIDTH) - 9 * axes[0]]), store, metric=metric)
        for count in (1, 2):
            hits = index.search(query[None], count)
            assert hits.ids == [[0, 1][:count]] and (hits.scores == hits.scores[0, 0]).all()

    def test_filters_and_thresholds(self, store: str, metric: str) -> None:
        count = 499 if store == "qdrant" else 2221
        index = small(count, store=store, metric=metric, metadata=[{"odd": i % 2, "n": i} for i in range(count)])
        queries = torch.randn(3, WIDTH)
        vectors = held(index)
        odd = {name: vector for name, vector in vectors.items() if name % 2}
        agree(index.search(queries, 7, filter={"odd": 1}), queries, odd, metric)
        agree(index.search(queries, 17, filter={"odd": 1, "n": 4}), queries, {}, metric)
        bar = float(index.search(queries, 7).scores[1, 3])
        hits = index.search(queries, 7, score_threshold=bar)
        assert hits.mask.tolist() == (index.search(queries, 7).scores >= bar).tolist()
        assert hits.ids is not None and hits.ids[1][4:] == [None] * 3 and None not in hits.ids[1][:4]

    def test_filters_hold_among_zeros_and_equals(self, store: str, metric: str) -> None:
        """Invariant 83: also where so many are allowed that an approximate store searches what it built."""
        count = 99 if store == "qdrant" else 2503
        zeros = [] if metric == "cosine" else [torch.zeros(count, WIDTH)]
        for vectors in (*zeros, torch.ones(count, WIDTH), (1e-6 * torch.randn(count, WIDTH)).half()):
            index = built(
                vectors.float() + (1e-20 if metric == "cosine" else 0), store, metric=metric, metadata=range(count)
            )
            if store == "qdrant":
                index.update(index.ids, metadata=[{"odd": row % 2} for row in range(count)])
            allowed = {"odd": 1} if store == "qdrant" else (lambda row: row % 2 == 1)
            index.delete([1, 5])
            hits = index.search(torch.randn(3, WIDTH), 23, filter=allowed)
            assert hits.ids is not None and hits.mask.any()
            found = {name for row in hits.ids for name in row if name is not None}
            assert all(name % 2 for name in found) and not found & {1, 5}

    def test_scores_carry_gradients(self, store: str, metric: str) -> None:
        index = small(101 if store == "qdrant" else 1103, store=store, metric=metric)
        queries = torch.randn(2, WIDTH, requires_grad=True)
        hits = index.search(queries, 5)
        (gradient,) = torch.autograd.grad(hits.scores.sum(), queries)
        again = queries.detach().double().requires_grad_()
        assert hits.vectors is not None
        vectors = hits.vectors.double()
        if metric == "l2":
            scores = -(again[:, None] - vectors).square().sum(-1)
        elif metric == "ip":
            scores = torch.einsum("be,bke->bk", again, vectors)
        else:
            scores = torch.cosine_similarity(again[:, None], vectors, dim=-1)
        (expected,) = torch.autograd.grad(scores.sum(), again)
        assert gradient.isfinite().all() and gradient.any()
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)

    def test_masked_hits_send_no_gradient(self, store: str, metric: str) -> None:
        index = small(3, store=store, metric=metric)
        queries = torch.randn(2, WIDTH, requires_grad=True)
        hits = index.search(queries, 7)
        hits.scores.softmax(-1)[:, 0].sum().backward()
        assert queries.grad is not None and queries.grad.isfinite().all() and queries.grad.any()


class TestQueries:
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_every_kind_find_the_same(self, kind: str) -> None:
        index = small(97, store=kind)
        query = torch.randn(WIDTH).half().float()
        expected = index.search(query[None], 3)
        for same in (query, query.double(), query.half(), query.tolist(), query.numpy(), Memory(query[None, None])):
            hits = index.search(same, 3)
            assert hits.ids == expected.ids
            torch.testing.assert_close(hits.scores, expected.scores, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("store", [*STORES, "qdrant"])
    def test_autocast_changes_nothing(self, store: str) -> None:
        index = small(101 if store == "qdrant" else 1499, store=store)
        queries = torch.randn(3, WIDTH)
        expected = index.search(queries, 5)
        with torch.autocast("cpu", torch.bfloat16):
            hits = index.search(queries, 5)
        assert hits.ids == expected.ids and torch.equal(hits.scores, expected.scores)

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_index_made_in_inference_mode_serves_training(self, kind: str) -> None:
        with torch.inference_mode():
            index = small(7, store=kind)
            index.add(torch.randn(2, WIDTH))
        query = torch.randn(1, WIDTH, requires_grad=True)
        index.search(query, 3).scores.sum().backward()
        assert query.grad is not None and query.grad.any()


def test_few_candidates_where_few_are_near() -> None:
    """The scan decides nearly everything; that it never errs does not come from looking at all."""
    found = ExactScan(torch.randn(5003, 211), "cosine").candidates(torch.randn(7, 211), 5)
    assert 5 <= found.shape[1] < 20


def test_coarse_products_of_float32_change_nothing() -> None:
    """Under "medium" a product of float32 matrices may round its factors to bfloat16."""
    vectors = torch.randn(67) + 1e-4 * torch.randn(1511, 67)
    index, queries = built(vectors, metric="ip"), vectors[:7] + 1e-4 * torch.randn(7, 67)
    fine, scan = index.search(queries, 11), ExactScan(vectors, "ip")
    before, few = torch.get_float32_matmul_precision(), scan.candidates(queries, 11)
    try:
        torch.set_float32_matmul_precision("medium")
        assert index.search(queries, 11).ids == fine.ids
        assert scan.candidates(queries, 11).shape[1] > few.shape[1]
    finally:
        torch.set_float32_matmul_precision(before)
