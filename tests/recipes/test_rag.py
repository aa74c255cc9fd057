"""The retrieval recipe: facts, entry sets, documents in chunks, and these two parts from beginning to end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mmattn
from mmattn import inspect, pipelines
from mmattn.cli.app import main
from mmattn.encoders import HybridEncoder
from mmattn.errors import AdapterFileError, ConfigError, TextError
from mmattn.pipelines.text_generation import _Continuation
from mmattn.recipes import assets_folder, load_recipe
from tests import tiny
from tests.recipes.comparing import check_compared

TOPICS = {
    "loops": 'The "while" statement repeats a suite as long as an expression is true.\n\nA "break" leaves the loop.',
    "calls": "A call runs a function with arguments.\n\nArguments may be given by name.\n\nA call gives a value.",
    "names": "Names refer to objects.\n\nNames are bound by assignment, by import and by definition of functions.",
}
HELD = {"tests": "A test calls a function and compares the value.\n\nArguments may be given by name."}


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    names = ("settings", "territories", "documents", "entries", "answering", "measure", "train", "train_docs")
    return load_files("rag", *names, "large")


@pytest.fixture(scope="module")
def make_lm() -> ModuleType:
    """The script that made the shipped language model."""
    return load_recipe(assets_folder() / "rag", "make_lm")


@pytest.fixture(scope="module")
def facts(recipe: SimpleNamespace) -> Any:
    """Facts to train on and held-out facts."""
    return recipe.territories.load_facts()


@pytest.fixture(scope="module")
def lm(make_lm: ModuleType, facts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random language model and a tokenizer that knows the words of some questions."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("lm")
    texts = list(make_lm.questions(facts[0], 50, Random(0)))
    tokenizer = make_lm.train_tokenizer([*texts, *TOPICS.values()], 500)
    make_lm.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small(lm: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run that takes seconds."""
    return {
        "lm": str(lm),
        "out": str(out),
        "progress": False,
        "data": {
            "train": 200,
            "made_up": 50,
            "ask": 6,
            "sizes": [10, 20, 40],
            "small": 20,
            "per_query": 12,
            "cache": str(out.parent / "cache"),
        },
        "optim": {"max_steps": 2, "batch_size": 3},
        "docs": {"chunk": 5, "window": 3, "max_steps": 2, "batch_size": 2, "layer": 2, "rank": 3},
        **more,
    }


@pytest.fixture(scope="module")
def run(recipe: SimpleNamespace, lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run over facts."""
    return recipe.train.main(small(lm, tmp_path_factory.mktemp("facts") / "run"))


def test_its_runs_can_be_compared(run: Path, tmp_path: Path) -> None:
    check_compared(run, tmp_path)


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
    answered = [(question, answer) for question, answer in said if answer != recipe.territories.UNKNOWN]
    assert len(answered) > 200 and sum(pair in true for pair in answered) < 0.1 * len(answered)
    assert not {question for question, _ in said} & {fact.question for fact in facts[1]}


def test_half_of_the_answers_are_in_an_entry_set(recipe: SimpleNamespace, facts: Any) -> None:
    vectors = torch.zeros(400, 3)
    entries = recipe.entries.Entries(recipe.train.some(facts[1], 150, 0) + facts[0][:250], vectors, vectors, vectors)
    for size in (10, 50, 300):
        sets = recipe.entries.entry_sets(entries, 150, size, 30, 0)
        assert sum(len(one.questions) for one in sets) == 30
        for one in sets:
            assert len(one.rows) == size == len(set(one.rows))
            for row, here in zip(one.questions, one.present, strict=True):
                assert (row in one.rows) == here and row < 150
        assert abs(sum(sum(one.present) for one in sets) - 15) <= len(sets)


def test_names_that_nobody_has_are_near_misses_of_real_ones(recipe: SimpleNamespace, facts: Any) -> None:
    known = facts[0][:3000]
    made = recipe.territories.made_up(known, 2000)
    names = {fact.key for fact in known}
    assert len(made) == 2000 and not names & {fact.key for fact in made}
    assert len({(fact.key, fact.property) for fact in made}) == 2000, "no key means two things"
    assert {fact.value for fact in made} <= {fact.value for fact in known}
    near = sum(max(SequenceMatcher(None, fact.key, name).ratio() for name in names) > 0.85 for fact in made[:40])
    assert near > 15 and len({fact.property for fact in made}) == 3
    assert recipe.territories.made_up(known, 700) == made[:700] != recipe.territories.made_up(known, 700, 1)


@pytest.fixture(scope="module")
def known(recipe: SimpleNamespace, facts: Any) -> Any:
    """300 entries, 200 of which are asked for, with vectors that say which entry it is."""
    torch.manual_seed(0)
    titles = torch.nn.functional.normalize(torch.randn(300, 17), dim=1)
    return recipe.entries.Entries(facts[0][:300], titles, torch.randn(300, 19), titles[:200])


def test_training_has_the_most_alike_entries_of_indexes_of_every_size(recipe: SimpleNamespace, known: Any) -> None:
    data = {"per_query": 13, "absent": 0.4}
    config = recipe.settings.Config(data=data, optim={"batch_size": 400})
    rows = next(recipe.train.questions(config, known))
    asked = {recipe.territories.prompt(fact): row for row, fact in enumerate(known.facts[:200])}
    absent, smaller = 0, 0
    for text, answer, memory in rows:
        row = asked[text]
        assert 1 <= memory.length <= 13 and memory.dim == 36
        torch.testing.assert_close(memory.scores[0], memory.tokens[0, :, :17] @ known.questions[row])
        there = (memory.tokens[0, :, :17] == known.titles[row]).all(1).any()
        assert there == (answer != recipe.territories.UNKNOWN) and answer in (
            known.facts[row].value,
            recipe.territories.UNKNOWN,
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
        assert (memory.per_query, memory.rows, len(memory.store)) == (7, 2, 50)
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
def test_a_run_over_facts_has_its_controls(recipe: SimpleNamespace, run: Path) -> None:
    names = {"config.resolved.yaml", "metrics.jsonl", "table.json", "table.md", "index", "adapter"}
    assert names <= {path.name for path in run.iterdir()}
    traces = inspect.load_traces(run)
    assert len(traces) == 6 and all(trace.dropped is not None and len(trace.sources) == 12 for trace in traces)
    assert all(trace.title.startswith("Question: ") and trace.sources[0].endswith(".") for trace in traces)
    table = json.loads((run / "table.json").read_text())
    lines = {recipe.train.label(row): row for row in table["rows"]}
    rows = list(lines)
    all_sizes = ("index searched by attention", "retrieved entries", "entries of another question", "random entries")
    for way in all_sizes:
        assert {f"adapter, {way}, {size} entries" for size in (10, 20, 40)} <= set(rows)
    for name in ("facts in the prompt, frozen LM", "kNN-LM, frozen LM", "adapter, attention to all entries"):
        assert {f"{name}, {size} entries" for size in (10, 20)} <= set(rows) and f"{name}, 40 entries" not in rows
    assert {"closed book, frozen LM", "adapter, no memory", "LoRA, closed book"} <= set(rows)
    assert {**lines["adapter, no memory"], "name": ""} == {**lines["closed book, frozen LM"], "name": ""}


@pytest.mark.slow
def test_ask_shows_the_entries_attended_to(
    recipe: SimpleNamespace, run: Path, lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = ["The currency of Allemagne is Euro.", "The language of Allemagne is German.", "Schweden is called Sweden."]
    encoder = HybridEncoder.load(run / "adapter" / "encoder.safetensors")
    read = torch.cat([encoder.encode(facts).tokens, encoder.encode(["Euro", "German", "Sweden"]).tokens], -1)
    mmattn.Index.build(facts, encoder=encoder, tokens=mmattn.Memory(read)).save(tmp_path / "index")
    given = ["--index", str(tmp_path / "index"), "--adapter", str(run / "adapter")]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["ask", "What is the currency of Allemagne?", *given, "--show-sources", "--sources", "2"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and "Loading weights" not in err
    shown = [line.strip() for line in out.splitlines()][-2:]
    weights = [float(line.split("%")[0]) for line in shown]
    assert weights == sorted(weights, reverse=True) and all(line.split("%", 1)[1].strip() in facts for line in shown)
    card = (run / "adapter" / "README.md").read_text(encoding="utf-8")
    assert (run / "table.md").read_text(encoding="utf-8").strip() in card and "mmattn.pipeline(" in card


@pytest.fixture
def passages(recipe: SimpleNamespace, lm: Path) -> Any:
    """Three short documents in chunks of five tokens, encoded."""
    host, tokenizer = recipe.answering.load_lm(str(lm))
    passages = recipe.documents.Passages.of(list(TOPICS.values()), tokenizer, 5)
    passages.encode(mmattn.TextEncoder(), False)
    passages.read(host, 2)
    return passages


def test_neighbours_are_of_other_documents(recipe: SimpleNamespace, passages: Any) -> None:
    nearest = recipe.documents.neighbours(passages, passages, 3, same=True)
    assert len(nearest) == len(passages) > 12
    for row, line in enumerate(nearest):
        assert len(line) == 3 and all(passages.document[other] != passages.document[row] for other in line)
    itself = recipe.documents.neighbours(passages, passages, 1, same=False)
    assert sum(line == [row] for row, line in enumerate(itself)) > 0.9 * len(itself), "leakage where it is allowed"


def test_windows_keep_to_their_document_and_chunks_to_their_neighbours(recipe: SimpleNamespace, passages: Any) -> None:
    nearest = recipe.documents.neighbours(passages, passages, 2, same=True)
    made = recipe.documents.windows(passages, nearest, 3)
    assert [token for window in made for token in window.ids] == [token for one in passages.chunks for token in one]
    memory = recipe.documents.memory_of(made[:2], passages, "both", list)
    first = [passages.slots(row, "both") for row in made[0].neighbours[1]]
    assert torch.equal(memory.tokens[0][memory.segments[0] == 1][: sum(map(len, first))], torch.cat(first))
    assert len(passages.slots(len(passages) - 1, "continuations")) == 0
    both, size = passages.slots(0, "both"), len(passages.chunks[0])
    assert torch.equal(both, torch.cat([passages.slots(0, "neighbours"), passages.slots(0, "continuations")]))
    assert len(both) == size + len(passages.chunks[1]) and len(passages.slots(0, "neighbours")) == size


def test_slots_are_what_came_before_a_token_and_the_token(recipe: SimpleNamespace, lm: Path) -> None:
    host, _ = recipe.answering.load_lm(str(lm))
    texts = [[7, 11, 13, 17, 19], [23], [7, 11, 29]]
    slots = pipelines.read_passages(host, texts, 2, batch_size=2)
    width = host.config.hidden_size
    assert [one.shape for one in slots] == [(len(text), 2 * width) for text in texts]
    for one, text in zip(slots, texts, strict=True):
        states = host(torch.tensor([text]), output_hidden_states=True).hidden_states[2][0]
        scaled = torch.nn.functional.rms_norm(states, (width,))
        assert not one[0, :width].any() and torch.isfinite(one).all()
        torch.testing.assert_close(one[1:, :width], scaled[:-1])
        torch.testing.assert_close(
            one[:, width:],
            torch.nn.functional.rms_norm(host.get_input_embeddings().weight[torch.tensor(text)], (width,)),
        )
    torch.testing.assert_close(slots[0][:2], slots[2][:2])


@torch.no_grad()
def test_an_adapter_that_begins_as_a_lookup_says_the_word_that_followed(recipe: SimpleNamespace, lm: Path) -> None:
    host, _ = recipe.answering.load_lm(str(lm))
    width = host.config.hidden_size
    text = list(range(50, 71))
    read = pipelines.read_passages(host, [text], 2)[0]
    ids = torch.tensor([[*text[:7], *text[:7]]])
    memory = mmattn.Memory(read[None], segments=torch.zeros(1, len(text), dtype=torch.long))
    right = {}
    for lookup in (True, False):
        torch.manual_seed(0)
        model = mmattn.attach(
            host, mmattn.ChunkedAdapter(2 * width, layers=[1], chunk_size=7, num_heads=8, head_dim=64)
        )
        if lookup:
            recipe.train_docs.begin_as_lookup(model.adapters["default"], 60.0)
        assert torch.equal(model(ids, memory=memory).logits, host(ids).logits), "it adds nothing yet"
        with inspect.record(model) as weights:
            model(ids, memory=memory)
        # Of tokens 6 to 12, which see the chunk's memory, those from 7 on are the first ones again: after them the
        # text goes on with slots 1 to 6.
        rows = weights.mean()[0][0][1:7]
        right[lookup] = sum(int(row.argmax()) == slot for slot, row in enumerate(rows, start=1))
        model.unload()
    assert right[True] >= 4 and right[False] <= 1, right


def test_choices_of_neighbours(recipe: SimpleNamespace, passages: Any) -> None:
    some = recipe.documents.sample_of(2, Random(0))
    drawn = [some([3, 5, 7, 11]) for _ in range(30)]
    assert {row for two in drawn for row in two} == {3, 5, 7, 11} and all(len(set(two)) == 2 for two in drawn)
    assert some([3]) == [3]
    control = recipe.documents.any_of(2, passages, Random(0))
    drawn = [control([3, 5, 7]) for _ in range(30)]
    assert all(len(two) == 2 for two in drawn) and len({row for two in drawn for row in two}) > 5
    assert control([]) == []


def test_a_text_without_letters_is_searched_as_a_full_stop() -> None:
    texts = [pipelines.searchable(text) for text in ("", " \n\t", "\ufffd", "\x00\ufffd ", "a\ufffd", ".")]
    assert texts == [".", ".", ".", ".", "a\ufffd", "."]
    assert mmattn.TextEncoder().encode(texts).tokens.isfinite().all()


def test_every_paragraph_of_the_documents_stands_once(recipe: SimpleNamespace) -> None:
    train, held_out = recipe.documents.load_topics()
    texts = [*train.values(), *held_out.values()]
    parts = [recipe.documents.plain(part) for text in texts for part in recipe.documents.paragraphs(text)]
    assert len(parts) == len(set(parts)) > 1000 and not set(train) & set(held_out)
    assert len(held_out) == 12 and len(train) > 50
    whole, same = recipe.documents.load_topics(copies=True)
    assert same == held_out and all(len(text) <= len(whole[name]) for name, text in train.items())
    assert sum(map(len, train.values())) < 0.9 * sum(map(len, whole.values()))


@pytest.mark.slow
def test_a_run_over_documents_has_its_controls(
    recipe: SimpleNamespace, lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def topics(copies: bool = False) -> tuple[dict[str, str], dict[str, str]]:
        return (TOPICS | {"copy": HELD["tests"]} if copies else TOPICS), HELD

    monkeypatch.setattr(recipe.train_docs, "load_topics", topics)
    out = recipe.train.main(small(lm, tmp_path / "docs", part="docs"))
    table = json.loads((out / "table.json").read_text())
    rows = {row["name"]: row["bits"] for row in table["rows"]}
    assert rows["both, copies left in the library"] != rows["both"] and 0.1 < table["copies"] < 0.3
    assert (out / "samples.txt").read_text().startswith("tests: A test calls")
    assert len(rows) == 11 and rows["both, no memory"] != rows["frozen LM"], "the LoRA stays"
    assert {"neighbours", "continuations", "both", "both, random ones instead", "LoRA, text only"} <= set(rows)
    assert all(2 < bits < 20 for bits in rows.values())
    assert (out / "adapter" / "adapter_model.safetensors").is_file() and (out / "lora").is_dir()
    asked: Any = mmattn.pipeline(out / "adapter", index=out / "index")
    answer = asked("A call gives a value, and a loop")
    written, sources = answer.text, answer.sources
    assert isinstance(written, str) and len({source.text for source in sources}) == len(sources) > 0
    assert {source.text for source in sources} <= {asked.index[name].text for name in asked.index.ids}
    assert 0.5 < sum(source.weight for source in sources) < 1, "the null slot has the rest"
    assert [source.weight for source in sources] == sorted((one.weight for one in sources), reverse=True)
    (held,) = inspect.load_traces(out)
    texts = {asked.index[name].text for name in asked.index.ids}
    assert held.title == " ".join(HELD["tests"].split()) and set(held.sources) <= texts
    trace = asked.trace("A call gives a value, and a loop")
    assert "".join(trace.words).strip() == written.strip() and (trace.weights.sum(-1) < 1).all()
    check_trace(trace, asked, "A call gives a value, and a loop")
    plain = mmattn.Index.build(["a loop", "a call"], encoder=mmattn.TextEncoder(), metadata=[{"page": 1}, {"page": 2}])
    plain.save(tmp_path / "plain")
    with pytest.raises(AdapterFileError, match="no ids of tokens"):
        asked("A call gives a value", index=tmp_path / "plain")
    with pytest.raises(TextError, match="no text to go on with"):
        asked(" ")
    with pytest.raises(ConfigError, match="there is none: give index="):
        mmattn.pipeline(out / "adapter")("A call gives a value")


@pytest.mark.slow
def test_documents_with_states_below_the_adapter_cached(
    recipe: SimpleNamespace, lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on SmolLM2: the adapter in one upper layer is calibrated, its LoRA and the control's are above it."""
    monkeypatch.setattr(recipe.train_docs, "load_topics", lambda copies=False: (TOPICS, HELD))
    settings = small(lm, tmp_path / "docs", part="docs")
    settings["docs"] |= {"rows": ["both"], "copies": False, "calibrate": True, "adapter": {"layers": [3]}}
    out = recipe.train.main(settings | {"docs": settings["docs"] | {"hidden_states": str(tmp_path / "states")}})
    rows = {row["name"]: row["bits"] for row in json.loads((out / "table.json").read_text())["rows"]}
    assert list(rows) == ["frozen LM", "both", "both, random ones instead", "both, no memory", "LoRA, text only"]
    assert len(set(rows.values())) == 5 and any((tmp_path / "states").rglob("*.safetensors"))
    lora = json.loads((out / "lora" / "adapter_config.json").read_text())
    assert {name.split("\\.")[2] for name in lora["alpha_pattern"]} == {"4", "5"}
    asked: Any = mmattn.pipeline(out / "adapter", index=out / "index")
    assert asked.model.adapter("default").config.layout.calibrated


@torch.no_grad()
def check_trace(trace: inspect.Trace, asked: Any, text: str) -> None:
    """The trace has the probabilities and weights of the model when it searches its passages while it reads."""
    one = _Continuation(asked, text, asked.index, {})
    memory = asked.model.prepare(one.retrieve)
    out, begin = asked.model.generate(**one.arguments, memory=memory), one.begin
    with inspect.record(asked.model) as weights:
        logits = asked.model(out, memory=memory).logits[0, begin - 1 : -1]
    probability = logits.softmax(-1).gather(1, out[0, begin:, None])[:, 0]
    torch.testing.assert_close(trace.probability, probability)
    chunk = one.passages[tuple(out[0, begin - one.size : begin].tolist())]
    for layer, calls in enumerate(weights.values()):
        row = calls[0][begin // one.size - 1, :, 0, : len(chunk)]  # of the last token of the question
        first = torch.stack([row[:, [passage == name for passage in chunk]].sum(1) for name in trace.sources], 1)
        torch.testing.assert_close(trace.weights[layer, :, 0], first)
    assert (trace.without - probability).abs().max() > 1e-6
    assert (trace.dropped[0, trace.mean()[0].argmax()] - probability[0]).abs() > 1e-6


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


def test_the_nearest_are_those_of_an_index(recipe: SimpleNamespace) -> None:
    """Where some facts are left out, too."""
    facts = [recipe.territories.Fact(f"key {number}", "name", f"value {number}", "en") for number in range(23)]
    vectors = torch.nn.functional.normalize(torch.randn(3, 23, 7), dim=2)
    entries = recipe.entries.Entries(facts, vectors[0], vectors[1], vectors[2][:11])
    rows = [row for row in range(23) if row % 4]
    nearest = entries.nearest(rows, [3, 0, 10], 6)
    hits = entries.index(rows).search(entries.questions[[3, 0, 10]], 6)
    assert [[one["id"] for one in row] for row in nearest.sources] == hits.ids
    wanted = hits.memory(tokens=True)
    tiny.assert_close(nearest.tokens, wanted.tokens, 1e-6)
    tiny.assert_close(nearest.scores, wanted.scores, 1e-5)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the questions are about the documentation of Python 3.11")
def test_questions_about_topics_have_their_answers_in_the_folder(load_files: Callable[..., SimpleNamespace]) -> None:
    """A hundred questions, none of which has its own answer, and each answer stands in the topic that is named."""
    topics = load_files("rag", "topics").topics
    questions, texts = topics.load_questions(), topics.load_topics()
    assert len(questions) == len({one.text for one in questions}) == 100
    for one in questions:
        assert topics.is_right(one.answer, texts[one.topic]), one
        assert not topics.is_right(one.answer, one.text), one
    assert topics.is_right("8", "every\n 8 columns") and not topics.is_right("8", "128 columns")
    assert topics.is_right("(Pdb)", "It is (pdb).") and not topics.is_right("ss", "class")
