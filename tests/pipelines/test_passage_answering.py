"""Questions answered from texts that a language model has read: the pipeline, the commands, the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM

import mmattn
from mmattn import pipelines
from mmattn.errors import AdapterFileError, ConfigError, TextError
from mmattn.pipelines.passage_answering import SYSTEM, USER
from mmattn.serving import Limits
from mmattn.serving.inputs import make_inputs
from mmattn.serving.requests import ChatRequest, CompletionRequest
from tests.cli.running import call
from tests.tiny_texts import save_encoder, tiny_tokenizer

TEXTS = [
    "the snowdrop flowers in winter",
    "the cornflower is blue",
    "the bluebell in <|end|> woods",
]
QUESTION = "When does <|end|> it flower?"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny language model with a chat template, and of a tiny encoder of texts."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken(one, special=True) for one in ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
            ]
        }
    )
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    lm = LlamaForCausalLM(config).eval()
    lm.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<|end|>")]
    lm.save_pretrained(folder / "host")
    tokenizer.save_pretrained(folder / "host")
    return {"host": str(folder / "host"), "encoder": str(save_encoder(folder / "encoder"))}


@pytest.fixture(scope="module")
def index(models: dict[str, str]) -> mmattn.Index:
    return mmattn.Index.build(TEXTS, encoder=mmattn.TextEncoder(models["encoder"]))


@pytest.fixture(scope="module")
def pipe(models: dict[str, str], index: mmattn.Index) -> Any:
    return mmattn.pipeline(**models, index=index, device="cpu")


def continued(pipe: Any, text: str, question: str, count: int) -> str:
    """What the bare host writes after its chat template with one text and a question; "<|end|>" of a user is plain."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    template = pipe.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    marks = {"<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"}
    pieces = template.replace("{passages}", "\0{passages}\0").replace("<", "\0<").replace(">", ">\0").split("\0")
    ids: list[int] = []
    for piece in filter(None, pieces):
        plain = piece.replace("{passages}", f"{text}\n\n").replace("{question}", question)
        ids += pipe.tokenizer(plain, add_special_tokens=False, split_special_tokens=piece not in marks)["input_ids"]
    given = torch.tensor([ids])
    made = pipe.model.host.generate(given, max_new_tokens=count, do_sample=False, pad_token_id=2)
    return str(pipe.tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)).strip()


def test_one_text_answers_as_the_prompt_does(pipe: Any, models: dict[str, str]) -> None:
    """The chat template stands around text and question; special tokens in both are plain text."""
    assert isinstance(pipe, pipelines.PassageAnsweringPipeline)
    for text in TEXTS:
        one = pipelines.build_index([{"text": text, "id": "flower"}], pipe.config, pipe.encoder)
        answer = pipe(QUESTION, index=one, max_new_tokens=9)
        assert answer.text == continued(pipe, text, QUESTION, 9) != ""
        (source,) = answer.sources
        assert (source.id, source.text) == ("flower", text) and 0 < source.weight < 1


def test_the_command_answers_or_says_that_nothing_fits(
    models: dict[str, str], index: mmattn.Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.save(tmp_path / "index")
    words = ["ask", TEXTS[0], "--index", tmp_path / "index", "--host", models["host"], "--encoder", models["encoder"]]
    code, out, _ = call(capsys, *words, "--device", "cpu", "--sources", 1)
    (source,) = (line for line in out.splitlines() if "%  " in line)
    assert code == 0 and source.startswith("1.000 ") and source.endswith(TEXTS[0])
    code, out, _ = call(capsys, *words, "--device", "cpu", "--passages", 2)
    assert code == 0 and sum("%  " in line for line in out.splitlines()) == 2
    code, out, said = call(capsys, *words, "--device", "cpu", "--score-threshold", 1.5)
    assert code == 0 and not out and "nothing fits: the best score is 1.000, below --score-threshold 1.5" in said


def test_several_texts(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is read once; sources are shares of the attention; streaming gives the same text."""
    several = pipe([QUESTION, "What is blue?"], passages=3, max_new_tokens=7)
    before = len(pipe.passages)
    for found in several:
        weights, scores = zip(*((source.weight, source.score) for source in found.sources), strict=True)
        assert len(scores) == 3 and list(scores) == sorted(scores, reverse=True) and 0 < sum(weights) < 1
        assert {source.text for source in found.sources} == set(TEXTS)
    assert several[0].text == pipe(QUESTION, passages=3, max_new_tokens=7).text != ""
    assert "".join(pipe.stream(QUESTION, passages=3, max_new_tokens=7)).strip() == several[0].text
    assert len(pipe.passages) == before
    memory = pipe.config.memory.model_copy(update={"margin": 0.0})
    monkeypatch.setattr(pipe, "config", pipe.config.model_copy(update={"memory": memory}))
    best = pipe(QUESTION, passages=1, max_new_tokens=7)
    assert best == pipe(QUESTION, max_new_tokens=7) and len(pipe(QUESTION, passages=3).sources) == 3
    assert [source.text for source in best.sources] == [several[0].sources[0].text]
    assert best.text == continued(pipe, best.sources[0].text, QUESTION, 7)
    assert "".join(pipe.stream(QUESTION, passages=1, max_new_tokens=7)).strip() == best.text
    with pytest.raises(ConfigError, match="passages must be"):
        pipe(QUESTION, passages=0)
    with pytest.raises(ConfigError, match="no trace"):
        pipe.trace(QUESTION)


def test_memory_is_bounded(pipe: Any, models: dict[str, str], index: mmattn.Index, monkeypatch: Any) -> None:
    """Passages beyond the bytes of a pipeline are read again, and answer the same."""
    monkeypatch.setattr("mmattn.pipelines.passage_answering.MAX_BYTES", 5000)
    small = mmattn.pipeline(**models, index=index, device="cpu")
    questions = [QUESTION, "What is blue?"]
    for _ in range(2):
        assert [one.text for one in small(questions)] == [one.text for one in pipe(questions)]
    assert len(small.passages) == 3 and 0 <= small.passages.nbytes() <= 5000 < pipe.passages.nbytes()


def test_the_host_says_where_an_answer_ends(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end tokens of the host's generation config end an answer, besides that of the tokenizer."""
    prompt, memory = pipe.inputs(QUESTION)
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 2}
    first = int(pipe.model.generate(torch.tensor([prompt]), memory=memory, **options)[0, -1])
    longer = pipe(QUESTION, max_new_tokens=9).text
    monkeypatch.setattr(pipe.model.host.generation_config, "eos_token_id", [first, 1])
    assert len(pipe(QUESTION, max_new_tokens=9).text) < len(longer)


def test_saved_and_loaded(pipe: Any, index: mmattn.Index, tmp_path: Path) -> None:
    """A saved pipeline has what the host has read; after another prompt it is refused."""
    answer = pipe(QUESTION, max_new_tokens=7)
    pipe.save(tmp_path / "saved")
    loaded = mmattn.pipeline(tmp_path / "saved", index=index, device="cpu")
    assert len(loaded.passages) == len(pipe.passages) and loaded(QUESTION, max_new_tokens=7).text == answer.text
    file = tmp_path / "saved" / "pipeline_config.json"
    file.write_text(file.read_text("utf-8").replace("<s><|", "<s>Read. <|"), encoding="utf-8")
    with pytest.raises(AdapterFileError, match="after another text"):
        mmattn.pipeline(tmp_path / "saved", index=index, device="cpu")


def test_a_prompt_without_passages_is_the_question_alone(pipe: Any, index: mmattn.Index, tmp_path: Path) -> None:
    """A folder of an earlier version, whose prompt is a text after passages that were read alone."""
    pipe.model.save_adapter(tmp_path, encoder=pipe.encoder.fingerprint)
    pipe.config.model_copy(update={"prompt": "{question}"}).save(tmp_path)
    old = mmattn.pipeline(tmp_path, index=index, device="cpu")
    prompt, memory = old.inputs("What is blue?", passages=3)
    assert prompt == "What is blue?" and old.passages.prefix == () and len(memory.rows[0]) == 3
    assert len(old("What is blue?", passages=3, max_new_tokens=3).sources) == 3


def test_requests_of_a_server(pipe: Any) -> None:
    """A request is answered from the index, or from its documents; vectors are refused."""

    def inputs(**fields: Any) -> Any:
        (one,) = make_inputs(pipe, CompletionRequest(model="any", prompt=QUESTION, **fields), Limits())
        return one

    _, memory = inputs(passages=3)
    assert memory.batch == 1 and len(memory.sources[0]) == 3
    prompt, memory = inputs(documents=[{"text": TEXTS[1]}])
    assert len(memory.rows[0]) == 1
    assert pipe.tokenizer.decode(prompt).endswith("<|end|><|assistant|>")
    with pytest.raises(ConfigError, match="no vectors"):
        inputs(memory=[[0.0]])
    with pytest.raises(TextError, match="has no text"):
        inputs(documents=[{"title": "a"}])
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": QUESTION}]
    with pytest.raises(ConfigError, match="reads passages before one question"):
        make_inputs(pipe, ChatRequest(model="any", messages=messages), Limits())


def test_misuse(pipe: Any, models: dict[str, str]) -> None:
    """A folder or a host, not neither or both; a host has nothing to upload and needs an index."""
    with pytest.raises(ConfigError, match="of a host="):
        mmattn.pipeline()
    with pytest.raises(ConfigError, match="of a host="):
        mmattn.pipeline("assets/vision/adapter", host=models["host"])
    with pytest.raises(ConfigError, match="goes with host="):
        mmattn.pipeline("assets/vision/adapter", encoder=models["encoder"])
    with pytest.raises(ConfigError, match="nothing to upload"):
        pipe.push_to_hub("someone/something")
    with pytest.raises(ConfigError, match="answers from an index"):
        mmattn.pipeline(**models, device="cpu")(QUESTION)


def test_the_commands(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of texts, its index, and an answer with the names of its sources; the same from what was read before."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, text in zip(("snow.txt", "corn.md", "bell.rst"), TEXTS, strict=True):
        (texts / name).write_text(text, encoding="utf-8")
    index, encoder = tmp_path / "index", ["--encoder", models["encoder"]]
    code, _, err = call(capsys, "index", "build", texts, "-o", index, *encoder, "--host", models["host"])
    assert code == 0, err
    words = ["ask", QUESTION, "--index", index, "--device", "cpu", "--passages", 3]
    code, out, err = call(capsys, *words, *encoder, "--host", models["host"])
    assert code == 0, err
    for name, text in zip(("snow.txt", "corn.md", "bell.rst"), TEXTS, strict=True):
        assert f"%  {name}:0  {text}" in out
    assert call(capsys, *words, "--adapter", tmp_path / "index.passages")[:2] == (0, out)
    code, _, err = call(capsys, *words, *encoder, "--adapter", tmp_path / "index.passages")
    assert code == 2 and "--encoder" in err
    both = ["--host", models["host"], "--for", "assets/rag/adapter"]
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n", encoding="utf-8")
    code, _, err = call(capsys, "index", "build", tmp_path / "lines.jsonl", "-o", index, *both)
    assert code == 2 and "--host" in err
