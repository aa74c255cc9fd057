"""MaxSim searches against the slow definition: ragged entries, masks, ties, filters, candidates, gradients."""

from __future__ import annotations

import pytest
import torch

from mmattn import Index, Memory
from mmattn.errors import ConfigError
from mmattn.retrieval import MultiVectorIndex
from tests.retrieval.late_interaction import (
    ENTRIES,
    METRICS,
    WIDTH,
    LetterStates,
    agree,
    asked,
    held,
    maxsim,
    ragged,
    reference,
)
from tests.retrieval.searching import STORES


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("store", STORES)
def test_finds_what_the_definition_finds(store: str, metric: str) -> None:
    settings = {"lists": 3, "visited": 3, "bytes": 13} if store == "ivfpq" else STORES[store]
    index = MultiVectorIndex.build(ragged(), metric=metric, store=store, **settings)
    agree(index, asked(), 7)
    agree(index, asked(), 7, num_candidates=ENTRIES)


@pytest.mark.parametrize("metric", METRICS)
def test_more_entries_than_are_compared_at_once(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmattn.retrieval.multi_vector._BLOCK", 1500)
    agree(MultiVectorIndex.build(ragged(), metric=metric), asked(), 11)


@pytest.mark.parametrize("metric", METRICS)
def test_masked_slots_of_entries_and_queries_never_count(metric: str) -> None:
    """Whatever lies in them, forward and backward."""
    entries, queries = ragged(), asked()
    plain = MultiVectorIndex.build(entries, metric=metric).search(queries, 5)
    for rubbish in (torch.nan, torch.inf, 1e17):
        filled = [Memory.pad(parts) for parts in (entries, queries)]
        rows, questions = (
            Memory(one.tokens.masked_fill(~one.real_slots()[..., None], rubbish), one.mask) for one in filled
        )
        # Padding in front and in the middle, too.
        flipped = Memory(rows.tokens.flip(1), rows.real_slots().flip(1))
        questions.tokens.requires_grad_()
        for memory in (rows, flipped):
            hits = MultiVectorIndex.build(memory, metric=metric).search(questions, 5)
            assert hits.ids == plain.ids
            torch.testing.assert_close(hits.scores, plain.scores, rtol=2e-7, atol=1e-7)
        (gradient,) = torch.autograd.grad(hits.scores.sum(), questions.tokens)
        assert gradient.isfinite().all() and not gradient[~questions.real_slots()].any()
        assert gradient[questions.real_slots()].any(-1).all()


def test_equal_entries_come_in_their_order() -> None:
    entries = [torch.eye(WIDTH)[[row % 3, 5]] for row in range(17)]
    index = MultiVectorIndex.build(entries)
    assert index.search(torch.eye(WIDTH)[[1, 5]], 5).ids == [[1, 4, 7, 10, 13]]
    # A vector that an entry has twice counts once.
    index.update([4], [torch.eye(WIDTH)[[1, 1, 1, 5]]])
    assert index.search(torch.eye(WIDTH)[[1, 5]], 5).ids == [[1, 4, 7, 10, 13]]


def test_vectors_that_cancel_each_other_are_found() -> None:
    """Their mean has no direction."""
    one = torch.eye(WIDTH)[:1]
    index = MultiVectorIndex.build([torch.eye(WIDTH)[3:5], torch.cat([one, -one])])
    assert index.search(torch.cat([one, -one]), 2).ids == [[1, 0]]
    assert index.search(torch.cat([one, -one]), 1, num_candidates=1).ids == [[1]]


def test_filters_and_thresholds() -> None:
    index = MultiVectorIndex.build(ragged(), metadata=[{"third": row % 3} for row in range(ENTRIES)])
    queries = asked()
    third = {name: part for name, part in held(index).items() if name % 3 == 1}
    for filter in ({"third": 1}, lambda about: about["third"] == 1):
        for count in (None, 7, 99):
            hits = index.search(queries, 7, filter=filter, num_candidates=count)
            assert hits.ids is not None and all(name % 3 == 1 for row in hits.ids for name in row)
            assert count == 7 or hits.ids == reference(queries, third, 7, "cosine")[0]
    plain = index.search(queries, 7)
    bar = float(plain.scores[2, 3])
    assert index.search(queries, 7, score_threshold=bar).mask.tolist() == (plain.scores >= bar).tolist()
    assert not index.search(queries, 7, filter={"third": 4}).mask.any()


@pytest.mark.parametrize("metric", METRICS)
def test_candidates_are_those_of_the_nearest_means(metric: str) -> None:
    index, queries = MultiVectorIndex.build(ragged(101), metric=metric), asked()
    parts = held(index)
    unit = torch.nn.functional.normalize if metric == "cosine" else lambda part: part
    means = torch.stack([unit(part.double()).mean(0) for part in parts.values()]).float()
    plain = Index.build(means, metric=metric)
    for count in (5, 53):
        hits = index.search(queries, 5, num_candidates=count)
        for row, query in enumerate(queries):
            (near,) = plain.search(unit(query.double()).mean(0).float(), count).ids or []
            ids, _ = reference([query], {name: parts[name] for name in sorted(near)}, 5, metric)
            assert hits.ids is not None and hits.ids[row] == ids[0]
    with pytest.raises(ConfigError, match="num_candidates must be at least 5, got 4"):
        index.search(queries, 5, num_candidates=4)


@pytest.mark.parametrize("metric", METRICS)
def test_scores_carry_gradients(metric: str) -> None:
    index = MultiVectorIndex.build(ragged(), metric=metric)
    queries = [query.requires_grad_() for query in asked()]
    hits = index.search(queries, 5)
    assert not index.search([query.detach() for query in queries], 5).scores.requires_grad
    gradients = torch.autograd.grad(hits.scores.square().sum(), queries)
    for row, query in enumerate(queries):
        again = query.detach().double().requires_grad_()
        scores = []
        for name in hits.ids[row]:  # type: ignore[index]
            vectors = index[name].tokens.double()  # type: ignore[union-attr]
            if metric == "cosine":
                fit = torch.cosine_similarity(again[:, None], vectors[None], dim=-1)
            else:
                fit = again @ vectors.T
            scores.append(fit.max(1).values.sum())
        (expected,) = torch.autograd.grad(torch.stack(scores).square().sum(), again)
        assert gradients[row].isfinite().all() and gradients[row].any(1).all()
        torch.testing.assert_close(gradients[row].double(), expected, rtol=1e-5, atol=1e-6)


def test_texts_and_queries_are_encoded_each_in_their_way() -> None:
    encoder = LetterStates()
    texts = ["sun and moon", "a grey cat", "the moon"]
    index = MultiVectorIndex.build(texts, encoder=encoder, metadata=[1, 2, 3])
    hits = index.search(["the moon", "cat"], 2)
    assert hits.texts is not None and [row[0] for row in hits.texts] == ["the moon", "a grey cat"]
    states, question = encoder.encode(["the moon"]).tokens[0], encoder.encode_query(["the moon"]).tokens[0]
    assert float(hits.scores[0, 0]) == pytest.approx(maxsim(question, states, "cosine"), rel=2e-7)
    assert index.search(encoder.encode_query(["the moon", "cat"]), 2).ids == hits.ids
    assert repr(index) == "MultiVectorIndex(3 entries, e=13, cosine, exact)"


class TestMemory:
    def test_the_vectors_of_hits_are_its_slots(self) -> None:
        entries = ragged()
        index = MultiVectorIndex.build(entries, texts=[f"text {row}" for row in range(ENTRIES)])
        hits = index.search(asked(), 3)
        assert hits.ids is not None
        memory = hits.memory()
        assert torch.equal(memory.tokens, hits.memory(tokens=True).tokens)
        for row, names in enumerate(hits.ids):
            parts = [entries[name] for name in names]
            count = sum(map(len, parts))
            assert memory.lengths[row] == count and torch.equal(memory.tokens[row, :count], torch.cat(parts))
            ranks = [rank for rank, part in enumerate(parts) for _ in part]
            assert memory.segments is not None and memory.segments[row, :count].tolist() == ranks
            assert memory.scores is not None and torch.equal(memory.scores[row, :count], hits.scores[row, ranks])
            slots = [(names[rank], slot) for rank, part in enumerate(parts) for slot in range(len(part))]
            assert memory.sources is not None and memory.sources[row][:count] == [
                {"id": name, "text": f"text {name}", "slot": slot} for name, slot in slots
            ]
        few = hits.first(2).memory()
        assert few.lengths == [sum(len(entries[name]) for name in names[:2]) for names in hits.ids]

    def test_nothing_found_is_a_memory_without_a_slot(self) -> None:
        for index in (MultiVectorIndex.build(ragged(5)), MultiVectorIndex.build(torch.empty(0, 3, WIDTH))):
            hits = index.search(asked(), 3, score_threshold=1e6)
            assert hits.memory().tokens.shape == (3, 0, WIDTH) and hits.first(2).memory().lengths == [0, 0, 0]
