"""The recipe `rag`: what is found among entries by their vectors alone, and what attention adds to that."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import mmattn
from mmattn import inspect
from tests import tiny


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    names = ("settings", "facts", "entries", "answering", "measure", "train", "neighbours", "large", "separation")
    return load_files("rag", *names)


def test_vectors_that_tell_questions_without_an_answer(recipe: SimpleNamespace) -> None:
    titles = torch.eye(5)
    near = torch.nn.functional.normalize(titles + 0.1 * titles.roll(1, 0), dim=1)
    assert recipe.separation.separation(near, titles, range(5)) == (1.0, 1.0)
    assert recipe.separation.separation(near, titles, [1, 2, 3, 4, 0])[0] == 0.0
    halves = titles + titles.roll(1, 0)
    assert recipe.separation.separation(halves / 2**0.5, titles, range(5))[1] == 0.0, "another is as much alike"


def test_queries_of_nothing_leave_the_scores_of_the_search(recipe: SimpleNamespace) -> None:
    """Scaled by 0, all entries with one score weigh alike; scaled by 1 or unscaled, they do not."""
    settings = mmattn.GatedAdapter(memory_dim=13, layers=(1,), num_heads=2, head_dim=6, score_bias=True)
    model = tiny.open_gates(mmattn.attach(tiny.make("llama"), settings))
    memory = mmattn.Memory(torch.randn(2, 5, 13), scores=torch.zeros(2, 5))
    spread = []
    for factor in (1.0, 0.5, 0.0):
        recipe.large.scale_queries(model, factor)
        with inspect.record(model) as weights:
            model(tiny.text(2), memory=memory)
        spread.append(float(weights.mean()[0].std(-1).max()))
    assert spread[0] > spread[1] > 1e-3 and spread[2] < 1e-6


def test_the_nearest_are_those_of_an_index(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, and where some facts are left out."""
    facts = [recipe.facts.Fact(f"key {number}", "name", f"value {number}", "en") for number in range(23)]
    vectors = torch.nn.functional.normalize(torch.randn(3, 23, 7), dim=2)
    entries = recipe.entries.Entries(facts, vectors[0], vectors[1], vectors[2][:11])
    monkeypatch.setattr(recipe.entries, "BLOCK", 5)
    rows = [row for row in range(23) if row % 4]
    found = entries.nearest(rows, [3, 0, 10], 6)
    hits = entries.index(rows).search(entries.questions[[3, 0, 10]], 6)
    assert [[one["id"] for one in row] for row in found.sources] == hits.ids
    wanted = hits.memory(tokens=True)
    tiny.assert_close(found.tokens, wanted.tokens, 1e-6)
    tiny.assert_close(found.scores, wanted.scores, 1e-5)
