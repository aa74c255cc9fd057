"""Hits and the memory they become."""

from __future__ import annotations

import pytest
import torch

from mmattn import CrossAttention, Index, Memory
from mmattn.errors import ConfigError, MaskError, ShapeError
from mmattn.retrieval import Hits
from tests.retrieval.searching import WIDTH, Letters, small

TEXTS = ["sun and moon", "a grey cat", "the moon"]


def test_hits_near_the_best() -> None:
    """Each query has its own best; what was masked before stays so."""
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    hits = Hits(torch.tensor([[0.9, 0.7, 0.2], [0.4, 0.3, 0.3], [0.1, 0.1, 0.1]]), mask)
    assert hits.near_best(0.25).mask.tolist() == [[True, True, False], [True, True, False], [False] * 3]
    with pytest.raises(ConfigError, match="margin"):
        hits.near_best(-0.1)


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
        none = index.search(torch.eye(3)[:2], 2, filter=lambda metadata: False)
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
