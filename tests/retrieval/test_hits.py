"""Hits and the memory they become; hits of faiss, of a retriever, and of plain tensors."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
import torch

from mmattn import CrossAttention, Index, Memory
from mmattn.errors import ConfigError, IndexMismatchError, MaskError, ShapeError
from mmattn.retrieval import Hits
from tests.retrieval.searching import METRICS, WIDTH, Letters, small

TEXTS = ["sun and moon", "a grey cat", "the moon"]


class TestMemory:
    def test_one_slot_per_entry(self) -> None:
        index = Index.build(TEXTS, encoder=Letters(), ids=["x", "y", "z"])
        hits = index.search(["the moon", "cat"], 5)
        memory = hits.memory()
        assert (memory.batch, memory.length, memory.dim, memory.lengths) == (2, 5, 31, [3, 3])
        assert memory.sources is not None and memory.sources[0][0] == {"id": "z", "text": "the moon"}
        assert memory.sources[1][3:] == [None, None]
        assert torch.equal(memory.tokens[0, 0], index["z"].vector)
        assert memory.scores is not None and torch.equal(memory.scores[:, :3], hits.scores[:, :3])
        assert not memory.scores[:, 3:].any() and not memory.tokens[:, 3:].any()
        assert memory.segments is not None and memory.segments[0].tolist() == [0, 1, 2, 3, 4]

    def test_a_threshold_masks(self) -> None:
        hits = small(17).search(torch.randn(2, WIDTH), 7)
        bar = float(hits.scores[0, 3])
        memory = hits.above(bar).memory()
        assert memory.mask is not None and memory.mask.tolist() == (hits.scores >= bar).tolist()
        assert memory.mask[0].sum() == 4
        assert not hits.above(1e9).memory().lengths[0]

    def test_all_tokens_of_all_entries(self) -> None:
        tokens = Memory.pad([torch.full((m, 5), float(m)) for m in (2, 3, 1)])
        index = Index.build(torch.eye(3), ids=["x", "y", "z"], texts=["X", None, "Z"], tokens=tokens)
        hits = index.search(torch.tensor([[0.1, 0.9, 0.3], [1.0, 0.0, 0.0]]), 2)
        memory = hits.memory(tokens=True)
        assert hits.ids == [["y", "z"], ["x", "y"]]
        assert (memory.lengths, memory.dim) == ([4, 5], 5)
        assert memory.tokens[0, :4, 0].tolist() == [3, 3, 3, 1] and memory.tokens[1, :, 0].tolist() == [2, 2, 3, 3, 3]
        assert memory.segments is not None and memory.segments[1].tolist() == [0, 0, 1, 1, 1]
        assert memory.sources is not None and memory.sources[0][3] == {"id": "z", "text": "Z", "slot": 0}
        assert memory.sources[1][1] == {"id": "x", "text": "X", "slot": 1} and memory.sources[0][4] is None
        assert memory.scores is not None and torch.equal(memory.scores[0, :4], hits.scores[0, [0, 0, 0, 1]])
        none = index.search(torch.eye(3)[:2], 2, filter={"no": 1})
        with pytest.raises(ConfigError, match="no query found"):
            none.memory(tokens=True)
        mixed = Hits(hits.scores, torch.tensor([[True, True], [False, False]]), tokens=hits.tokens)
        assert mixed.memory(tokens=True).lengths == [4, 0]

    def test_tokens_stay_with_their_entries(self) -> None:
        index = Index.build(torch.eye(3), tokens=Memory.pad([torch.full((m, 5), float(m)) for m in (2, 3, 1)]))
        index.add(torch.eye(3)[:1] * 2, tokens=Memory(torch.full((1, 4, 5), 4.0)))
        index.update([1], torch.ones(1, 3), tokens=Memory(torch.full((1, 7, 5), 7.0)))
        index.delete([0])
        tokens = {name: index[name].tokens for name in index.ids}
        assert {name: len(part) for name, part in tokens.items() if part is not None} == {1: 7, 2: 1, 3: 4}
        for change in (
            lambda: index.add(torch.eye(3)[:1]),
            lambda: index.update([1], torch.ones(1, 3)),
            lambda: index.add(torch.eye(3)[:1], tokens=Memory(torch.ones(1, 2, 7))),
        ):
            with pytest.raises(ShapeError, match="tokens"):
                change()
        assert index.ids == (1, 2, 3)

    def test_scores_bias_attention_and_learn_the_query(self) -> None:
        """Masked hits bias nothing and send no NaN back."""
        query = torch.randn(2, WIDTH, requires_grad=True)
        memory = small(3).search(query, 5).memory()
        layer = CrossAttention(7, WIDTH, 1, head_dim=11, score_bias=True)
        layer(torch.randn(2, 13, 7), memory.tokens, mask=memory.mask, scores=memory.scores).square().sum().backward()
        assert query.grad is not None and query.grad.isfinite().all() and query.grad.any()

    def test_what_cannot_be_made(self) -> None:
        scores = torch.randn(2, 3)
        with pytest.raises(ConfigError, match="no vectors"):
            Hits(scores).memory()
        with pytest.raises(ConfigError, match="no encoded tokens"):
            Hits(scores, vectors=torch.ones(2, 3, 5)).memory(tokens=True)
        with pytest.raises(ShapeError, match=r"mask must be \(b, k\)"):
            Hits(scores, torch.ones(3, 2, dtype=torch.bool))
        with pytest.raises(MaskError, match="bool"):
            Hits(scores, torch.ones(2, 3))
        with pytest.raises(ShapeError, match=r"vectors must be \(b, k, e\)"):
            Hits(scores, vectors=torch.ones(2, 5, 3))
        with pytest.raises(ShapeError, match="ids need one value per hit"):
            Hits(scores, ids=[["a"], ["b"]])
        with pytest.raises(ShapeError, match="scores must be a float tensor"):
            Hits(torch.ones(2, 3, dtype=torch.long))

    def test_garbage_behind_the_mask_is_gone(self) -> None:
        vectors = torch.full((1, 2, 3), torch.nan)
        vectors[0, 0] = 1
        hits = Hits(torch.tensor([[0.5, torch.nan]]), torch.tensor([[True, False]]), vectors, [["a", "b"]])
        assert hits.ids == [["a", None]] and hits.memory().tokens.isfinite().all()
        assert hits.scores.tolist() == [[0.5, -torch.inf]]


class TestFaiss:
    @pytest.mark.parametrize("metric", METRICS)
    def test_hits_of_an_index_of_ones_own(self, metric: str) -> None:
        index = small(17, metric=metric, ids=[f"n{row}" for row in range(17)])
        vectors = torch.stack([index[name].vector for name in index.ids])
        queries = torch.randn(3, WIDTH)
        if metric == "cosine":
            queries, vectors = torch.nn.functional.normalize(queries), torch.nn.functional.normalize(vectors)
        theirs = faiss.IndexFlat(WIDTH, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
        theirs.add(vectors.numpy())
        hits = Hits.from_faiss(*theirs.search(queries.numpy(), 23), index)
        expected = index.search(queries, 23)
        assert hits.ids == expected.ids
        assert hits.ids is not None and hits.ids[0][17:] == [None] * 6  # faiss gave -1, and ids[-1] is an entry
        torch.testing.assert_close(hits.scores, expected.scores, rtol=1e-4, atol=1e-4)
        assert hits.memory().lengths == [17] * 3

    def test_numbers_beyond_the_entries(self) -> None:
        with pytest.raises(IndexMismatchError, match="entry 5, and this index has 3"):
            Hits.from_faiss(np.zeros((1, 2)), np.array([[0, 5]]), small(3))
        with pytest.raises(ShapeError, match=r"\(b, k\)"):
            Hits.from_faiss(np.zeros((1, 3)), np.zeros((1, 2), dtype=int), small(3))


class Retriever:
    """As transformers' RagRetriever over a data set: -1 where nothing was found, and no document for those."""

    def __init__(self, shorter: int = 0) -> None:
        self.shorter = shorter
        self.asked: Any = None

    def retrieve(self, queries: np.ndarray, n_docs: int) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
        self.asked = (queries, n_docs)
        vectors = np.ones((len(queries), n_docs, 7), dtype=np.float32) * np.arange(1, n_docs + 1)[:, None]
        ids = np.tile(np.arange(10, 10 + n_docs), (len(queries), 1))
        ids[1, -1] = -1
        documents = [
            {
                "text": [f"text {name}" for name in row if name >= 0][self.shorter :],
                "title": [f"title {name}" for name in row if name >= 0],
                "embeddings": [None] * n_docs,
            }
            for row in ids
        ]
        return vectors.astype(np.float32), ids, documents


class TestRetriever:
    def test_hits(self) -> None:
        queries = torch.randn(2, 7, requires_grad=True)
        retriever = Retriever()
        hits = Hits.from_retriever(retriever, queries, 3)
        assert isinstance(retriever.asked[0], np.ndarray) and retriever.asked[1] == 3
        assert hits.ids == [[10, 11, 12], [10, 11, None]] and hits.mask.tolist() == [[True] * 3, [True, True, False]]
        assert hits.texts == [["text 10", "text 11", "text 12"], ["text 10", "text 11", None]]
        assert hits.metadata is not None and hits.metadata[0][1] == {"title": "title 11"}
        torch.testing.assert_close(hits.scores[0].detach(), queries[0].detach().sum() * torch.tensor([1.0, 2.0, 3.0]))
        hits.scores[:, :2].sum().backward()
        assert queries.grad is not None and torch.equal(queries.grad, torch.full((2, 7), 3.0))
        assert hits.memory().lengths == [3, 2]

    def test_what_does_not_fit(self) -> None:
        with pytest.raises(IndexMismatchError, match=r"\(2, 3, 7\).*\(2, 5\)"):
            Hits.from_retriever(Retriever(), torch.randn(2, 5), 3)
        with pytest.raises(IndexMismatchError, match="2 'text' for 3 documents"):
            Hits.from_retriever(Retriever(shorter=1), torch.randn(2, 7), 3)
