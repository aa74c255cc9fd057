"""The retrieval recipe: facts and entry sets, and a run over them from beginning to end."""

from __future__ import annotations

import sys
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mmattn
from mmattn.cli.app import main
from mmattn.encoders import NameEncoder
from mmattn.pipelines import build_index
from tests import tiny

RECIPE = "rag"


def test_facts_are_real_and_divided_by_their_keys(facts: Any) -> None:
    known, held = facts
    assert len(known) > 30_000 and len(held) > 5000
    assert not {fact.key for fact in known} & {fact.key for fact in held}
    assert {fact.value for fact in held} <= {fact.value for fact in known}, "answers are shared, keys are not"
    values = {(fact.key, fact.property): fact.value for fact in known + held}
    assert values["Allemagne", "name"] == "Germany" and values["Allemagne", "currency"] == "Euro"
    assert values["Allemagne", "language"] == "German" and values["Schweden", "currency"] == "Swedish Krona"
    assert len(values) == len(known + held), "no key means two things"


def test_the_language_model_is_taught_no_fact(recipe: SimpleNamespace, make_lm: ModuleType, facts: Any) -> None:
    true = {(fact.question, fact.value) for part in facts for fact in part}
    said = [text.rsplit("Question: ", 1)[1].split("\nAnswer: ") for text in make_lm.questions(facts[0], 300, Random(0))]
    answered = [(question, answer) for question, answer in said if answer != recipe.data.UNKNOWN]
    assert len(answered) > 200 and sum(pair in true for pair in answered) < 0.1 * len(answered)
    assert not {question for question, _ in said} & {fact.question for fact in facts[1]}


def test_half_of_the_answers_are_in_an_entry_set(recipe: SimpleNamespace, facts: Any) -> None:
    vectors = torch.zeros(400, 3)
    entries = recipe.data.Entries(
        recipe.train.sample_facts(facts[1], 150, 0) + facts[0][:250], vectors, vectors, vectors
    )
    for size in (10, 50, 300):
        sets = recipe.data.entry_sets(entries, 150, size, 30, 0)
        assert sum(len(one.questions) for one in sets) == 30
        for one in sets:
            assert len(one.rows) == size == len(set(one.rows))
            for row, here in zip(one.questions, one.present, strict=True):
                assert (row in one.rows) == here and row < 150
        assert abs(sum(sum(one.present) for one in sets) - 15) <= len(sets)


def test_names_that_nobody_has_are_near_misses_of_real_ones(recipe: SimpleNamespace, facts: Any) -> None:
    known = facts[0][:3000]
    made = recipe.data.synthetic(known, 2000)
    names = {fact.key for fact in known}
    assert len(made) == 2000 and not names & {fact.key for fact in made}
    assert len({(fact.key, fact.property) for fact in made}) == 2000, "no key means two things"
    assert {fact.value for fact in made} <= {fact.value for fact in known}
    near = sum(max(SequenceMatcher(None, fact.key, name).ratio() for name in names) > 0.85 for fact in made[:40])
    assert near > 15 and len({fact.property for fact in made}) == 3
    assert recipe.data.synthetic(known, 700) == made[:700] != recipe.data.synthetic(known, 700, 1)


@pytest.fixture(scope="module")
def known(recipe: SimpleNamespace, facts: Any) -> Any:
    """300 entries, 200 of which are asked for, with vectors that say which entry it is."""
    torch.manual_seed(0)
    titles = torch.nn.functional.normalize(torch.randn(300, 17), dim=1)
    return recipe.data.Entries(facts[0][:300], titles, torch.randn(300, 19), titles[:200])


def test_training_has_the_most_alike_entries_of_indexes_of_every_size(recipe: SimpleNamespace, known: Any) -> None:
    data = {"per_query": 13, "absent": 0.4}
    config = recipe.settings.Config(data=data, optim={"per_device_train_batch_size": 400})
    rows = next(recipe.train.questions(config, known))
    asked = {recipe.data.prompt(fact): row for row, fact in enumerate(known.facts[:200])}
    absent, smaller = 0, 0
    for text, answer, memory in rows:
        row = asked[text]
        assert 1 <= memory.length <= 13 and memory.dim == 36
        torch.testing.assert_close(memory.scores[0], memory.tokens[0, :, :17] @ known.questions[row])
        there = (memory.tokens[0, :, :17] == known.titles[row]).all(1).any()
        assert there == (answer != recipe.data.UNKNOWN) and answer in (
            known.facts[row].value,
            recipe.data.UNKNOWN,
        )
        absent += not there
        smaller += memory.length < 13
    assert 120 < absent < 200 and 40 < smaller < 360


@pytest.mark.parametrize("how", ["index", "all", "hits", "shuffled", "random"])
def test_the_memory_of_a_question(recipe: SimpleNamespace, known: Any, how: str) -> None:
    config = recipe.settings.Config(data={"per_query": 7, "sizes": [50], "ask": 10})
    measure = recipe.measure.Measure(config, None, known, 100)
    (one,) = measure.sets[50]
    memory = measure.memory_of(one, how)([1, 2])
    if how == "index":
        assert (memory.per_query, memory.batch, len(memory.store)) == (7, 2, 50)
        entries = memory.entries(None, True)
        assert torch.equal(entries.memory().tokens[0], known.slots(one.rows))
        want = known.questions[one.questions[1:3]] @ known.titles[one.rows].T
        torch.testing.assert_close(entries.scores(torch.arange(50)), want)
        return
    assert memory.batch == 2 and memory.length == (50 if how == "all" else 7)
    for row in range(2):
        question = known.questions[one.questions[(2 if how == "shuffled" else 1) + row]]
        scores = memory.tokens[row, :, :17] @ question
        torch.testing.assert_close(memory.scores[row], scores)
        if how != "random":
            assert (scores.max() - (known.titles[one.rows] @ question).max()).abs() < 1e-5


@pytest.mark.slow
def test_indexes_too_large_for_a_run(
    recipe: SimpleNamespace, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["large", str(run), str(run), "--size", "60", "--ask", "8", "--store", "hnsw"]
    monkeypatch.setattr(sys, "argv", words)
    recipe.large.main()
    table = capsys.readouterr().out
    assert "| index, 60 entries" in table and "| hits, 60 entries" in table
    monkeypatch.setattr(sys, "argv", [*words, "--ask", "13"])
    with pytest.raises(SystemExit):
        recipe.large.main()


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_the_shipped_pipeline_answers_as_the_recipe_does(
    recipe: SimpleNamespace, facts: Any, tmp_path: Path, count: int
) -> None:
    asked, pipe = facts[1][:count], mmattn.pipeline("assets/rag/adapter", device="cpu")
    rows = [{"title": fact.title, "value": fact.value} for fact in asked]
    answers = pipe([fact.question for fact in asked], index=build_index(rows, pipe.config, pipe.encoder))
    entries = recipe.data.Entries.of(asked, count, pipe.encoder, tmp_path)
    entries.questions = pipe.encoder.project_queries(entries.questions)
    memory = entries.nearest(range(count), range(count), pipe.config.memory.top_k)
    prompts = [recipe.data.prompt(fact) for fact in asked]
    assert [one.text for one in answers] == recipe.answering.write_answers(
        pipe.model, pipe.tokenizer, prompts, memory.__getitem__
    )


def test_rows_learn_answers_alone(recipe: SimpleNamespace, lm: Path) -> None:
    _, tokenizer = recipe.answering.load_lm(str(lm))
    batch = recipe.answering.answer_batch(tokenizer, ["Question: a?\nAnswer:", "b:"], ["Euro", "US Dollar"])
    for labels, answer in zip(batch.labels, [" Euro", " US Dollar"], strict=True):
        said = labels[labels != -100]
        assert int(said[-1]) == tokenizer.eos_token_id and tokenizer.decode(said[:-1]) == answer


def test_counts_are_what_their_heads_say(recipe: SimpleNamespace) -> None:
    lines = [
        ("Euro", "Euro", True),
        ("Euro", "unknown", False),
        ("unknown", "unknown", None),
        ("unknown", "Euro", None),
    ]
    answers = [{"right": right, "answer": text, "attended_right": top} for right, text, top in lines]
    wanted = {"accuracy": 0.5, "attended": 0.5, "precision": 0.5, "recall": 0.5}
    assert recipe.measure.shares(answers) == wanted


@pytest.mark.slow
def test_ask_shows_the_entries_attended_to(
    recipe: SimpleNamespace, run: Path, lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = ["The currency of Allemagne is Euro.", "The language of Allemagne is German.", "Schweden is called Sweden."]
    encoder = NameEncoder.load(run / "adapter" / "encoder.safetensors")
    read = torch.cat([encoder.encode(facts).tokens, encoder.encode(["Euro", "German", "Sweden"]).tokens], -1)
    mmattn.Index.build(facts, encoder=encoder, tokens=mmattn.Memory(read)).save(tmp_path / "index")
    given = ["--index", str(tmp_path / "index"), "--adapter", str(run / "adapter")]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["ask", "What is the currency of Allemagne?", *given, "--show-sources", "--sources", "2"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and "Loading weights" not in err
    shown = [line.split(maxsplit=2) for line in out.splitlines()[-2:]]
    assert all(text in facts and share.endswith("%") for _, share, text in shown)
    scores = [float(score) for score, _, _ in shown]
    assert scores == sorted(scores, reverse=True)
    card = (run / "adapter" / "README.md").read_text(encoding="utf-8")
    assert (run / "table.md").read_text(encoding="utf-8").strip() in card and "mmattn.pipeline(" in card


def test_the_nearest_are_those_of_an_index(recipe: SimpleNamespace) -> None:
    """Where some facts are left out, too."""
    facts = [recipe.data.Fact(f"key {number}", "name", f"value {number}", "en") for number in range(23)]
    vectors = torch.nn.functional.normalize(torch.randn(3, 23, 7), dim=2)
    entries = recipe.data.Entries(facts, vectors[0], vectors[1], vectors[2][:11])
    rows = [row for row in range(23) if row % 4]
    nearest = entries.nearest(rows, [3, 0, 10], 6)
    hits = entries.index(rows).search(entries.questions[[3, 0, 10]], 6)
    assert [[one["id"] for one in row] for row in nearest.sources] == hits.ids
    wanted = hits.memory(tokens=True)
    tiny.assert_close(nearest.tokens, wanted.tokens, 1e-6)
    tiny.assert_close(nearest.scores, wanted.scores, 1e-5)
