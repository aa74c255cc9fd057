"""The interface of OpenAI, by its own client: how tokens are chosen, conversations, embeddings and errors."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import mmattn
from mmattn.errors import ConfigError, ShapeError
from mmattn.serving import Engine, Limits
from tests.serving.servers import FACTS, QUESTIONS, Server, answering_pipe, serving, talking_pipe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

WIDTH = 13
VECTORS = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return talking_pipe(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def server(pipe: Any) -> Iterator[Server]:
    with serving(pipe, max_requests=37, max_tokens=40) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as asks:
        yield asks
    assert server.until(server.is_idle), "a request or its memory is left behind"


def complete(client: Any, prompt: Any, memory: Any = VECTORS, **options: Any) -> Any:
    extra = {"memory": memory} | {name: options.pop(name) for name in ("top_k",) if name in options}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **{"max_tokens": 7} | options)


def ids_of(pipe: Any, question: str) -> list[int]:
    return list(pipe.make_prompt(question))


@torch.no_grad()
def by_definition(pipe: Any, ids: list[int], tokens: int, **settings: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens chosen one by one from logits without a cache, as OpenAI describes its fields; and the logits."""
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    written: list[int] = []
    rows = []
    for _ in range(tokens):
        text = torch.tensor([[*ids, *written]])
        logits = pipe.model(text, memory=torch.tensor([VECTORS])).logits[0, -1]
        rows.append(logits)
        scores = logits.clone()
        for token, count in Counter(written).items():
            scores[token] -= settings.get("presence_penalty", 0) + count * settings.get("frequency_penalty", 0)
        if not settings.get("temperature"):
            token = int(scores.argmax())
        else:
            probability = (scores / settings["temperature"]).softmax(-1)
            order = probability.argsort(descending=True).tolist()
            kept, total = order[: settings.get("top_k") or len(order)], 0.0
            allowed = set()
            mass = sum(float(probability[one]) for one in kept)
            for one in kept:
                if total / mass < settings.get("top_p", 1):
                    allowed.add(one)
                total += float(probability[one])
            probability[[one for one in order if one not in allowed]] = 0
            token = int(torch.multinomial(probability / probability.sum(), 1, generator=generator))
        written.append(token)
        if token == pipe.tokenizer.eos_token_id:
            break
    return written, rows


def text_of(pipe: Any, tokens: list[int]) -> str:
    return str(pipe.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0, "top_p": 0.5, "seed": 5},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.3, "top_k": 5, "seed": 12},
        {"temperature": 1.1, "top_p": 0.6, "seed": 13},
        {"temperature": 1.5, "top_k": 23, "top_p": 0.9, "seed": 14},
        {"frequency_penalty": 1.7, "temperature": 0.0},
        {"presence_penalty": 1.9, "temperature": 0.0},
        {"presence_penalty": -0.7, "frequency_penalty": 0.9, "temperature": 0.8, "seed": 15},
    ],
    ids=lambda settings: "-".join(settings) or "greedy",
)
def test_tokens_are_chosen_as_the_fields_say(client: Any, pipe: Any, settings: dict[str, Any]) -> None:
    """The same alone and among others, which are chosen otherwise."""
    ids = ids_of(pipe, "What is white?")
    wanted = text_of(pipe, by_definition(pipe, ids, 13, **settings)[0])
    assert complete(client, ids, max_tokens=13, **settings).choices[0].text.strip() == wanted
    others = [{"temperature": 1.0, "seed": number} for number in range(7)]
    with ThreadPoolExecutor(9) as pool:
        asked = [settings, *others, settings]
        made = list(pool.map(lambda one: complete(client, ids, max_tokens=13, **one).choices[0].text.strip(), asked))
    assert made[0] == made[-1] == wanted and len(set(made[1:-1])) > 3


def test_without_a_temperature_another_field_asks_to_sample(client: Any, pipe: Any) -> None:
    ids = ids_of(pipe, "What is white?")
    wanted = text_of(pipe, by_definition(pipe, ids, 7, temperature=1.0, seed=29)[0])
    assert complete(client, ids, seed=29).choices[0].text.strip() == wanted
    assert len({one.text for one in complete(client, ids, n=11).choices}) > 1


def test_several_answers_have_seeds_one_after_the_other(client: Any, pipe: Any) -> None:
    ids = ids_of(pipe, "What is white?")
    wanted = [text_of(pipe, by_definition(pipe, ids, 7, temperature=1.0, seed=seed)[0]) for seed in (31, 32, 33)]
    made = complete(client, ids, n=3, seed=31, temperature=1.0)
    assert [one.text.strip() for one in made.choices] == wanted and [one.index for one in made.choices] == [0, 1, 2]
    assert made.usage.prompt_tokens == len(ids)
    streamed: dict[int, str] = {}
    for chunk in complete(client, ids, n=3, seed=31, temperature=1.0, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[number].strip() for number in range(3)] == wanted


def test_many_prompts_as_texts_and_as_ids(client: Any, pipe: Any) -> None:
    questions = ["What is white?", "What is red?", "Who?"]
    wanted = [pipe(one, torch.tensor([VECTORS]), max_new_tokens=7) for one in questions]
    made = complete(client, questions)
    assert [one.text for one in made.choices] == wanted
    rows = [ids_of(pipe, one) for one in questions]
    assert [one.text for one in complete(client, rows).choices] == wanted
    assert complete(client, rows[1]).choices[0].text == wanted[1]
    assert made.usage.prompt_tokens == sum(map(len, rows))
    with pytest.raises(openai.BadRequestError, match="knows 0 to 2047"):
        complete(client, [5000])
    with pytest.raises(openai.BadRequestError, match="prompt.0"):
        complete(client, [2**70])
    with pytest.raises(openai.BadRequestError, match="38 answers to one request are more than 37"):
        complete(client, ["a", "b"], n=19)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_end_an_answer(client: Any, pipe: Any, stream: bool) -> None:
    whole = complete(client, "What is white?", max_tokens=23).choices[0].text
    words = whole.split()
    assert len(words) > 4
    stop = f"{words[2]} {words[3][0]}"  # from within one token into another
    for stops in (stop, ["nothing of the kind", stop]):
        made = complete(client, "What is white?", max_tokens=23, stop=stops, stream=stream)
        chunks = list(made) if stream else [made]
        text = "".join(one.choices[0].text for one in chunks)
        assert text.rstrip() == whole[: whole.index(stop)].rstrip()
        assert chunks[-1].choices[0].finish_reason == "stop"
    cut = complete(client, "What is white?", max_tokens=23, stop=stop, logprobs=0, stream=stream)
    told = [token for one in (cut if stream else [cut]) for token in one.choices[0].logprobs.tokens]
    before = whole[: whole.index(stop)].strip()
    assert "".join(told).strip().startswith(before), "tokens before the stop text are told"
    assert before.startswith("".join(told[:-1]).strip()), "but for the one in which it begins, no others are"
    made = complete(client, "What is white?", max_tokens=23, stop=[f"{whole[-3:]}x"], stream=stream)
    text = "".join(one.choices[0].text for one in (made if stream else [made]))
    assert text.strip() == whole, "what was held back comes with the end"


def test_log_probabilities(client: Any, pipe: Any) -> None:
    """Of the model, before temperature and penalties."""
    ids = ids_of(pipe, "What is white?")
    options = {"temperature": 1.2, "seed": 17, "frequency_penalty": 0.3}
    tokens, logits = by_definition(pipe, ids, 7, **options)
    made = complete(client, ids, logprobs=3, **options).choices[0]
    told = made.logprobs
    assert told.tokens == [pipe.tokenizer.decode([token]) for token in tokens]
    for token, row, logprob, top, offset in zip(
        tokens, logits, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
    ):
        logs = row.log_softmax(-1)
        assert math.isclose(logprob, float(logs[token]), abs_tol=1e-3)
        best = logs.topk(3)
        assert sorted(top) == sorted(pipe.tokenizer.decode([int(one)]) for one in best.indices)
        assert torch.allclose(torch.tensor(sorted(top.values())), best.values.sort().values, atol=1e-3)
        assert offset == len("".join(told.tokens)[:offset])
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "What is white?"}], logprobs=True, top_logprobs=2,
        extra_body={"memory": VECTORS}, max_tokens=7, **options,
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx(told.token_logprobs, abs=1e-3)
    assert [bytes(one.bytes).decode() for one in content] == told.tokens
    assert all(len(one.top_logprobs) == 2 for one in content)
    streamed = complete(client, ids, logprobs=3, stream=True, **options)
    assert [token for chunk in streamed for token in chunk.choices[0].logprobs.tokens] == told.tokens


def test_a_prompt_is_scored(client: Any, pipe: Any) -> None:
    """As evaluation harnesses ask: no new token, the prompt and its log-probabilities."""
    ids = ids_of(pipe, "What is white?")
    with torch.no_grad():
        logs = pipe.model(torch.tensor([ids]), memory=torch.tensor([VECTORS])).logits[0].log_softmax(-1)
    wanted = [float(row[token]) for row, token in zip(logs, ids[1:], strict=False)]
    made = complete(client, ids, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert made.logprobs.token_logprobs[0] is None
    assert made.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
    assert made.text == pipe.tokenizer.decode(ids) and made.finish_reason == "length"
    more = complete(client, ids, max_tokens=3, echo=True, logprobs=1).choices[0]
    assert more.text == "".join(more.logprobs.tokens).rstrip(), "blanks between prompt and answer stay"
    for token, offset in zip(more.logprobs.tokens, more.logprobs.text_offset, strict=True):
        assert f"{more.text} "[offset:].startswith(token.rstrip())
    assert more.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-3)
    assert more.text.startswith(made.text) and len(more.logprobs.tokens) == len(ids) + 3
    assert complete(client, "What is white?", max_tokens=0).choices[0].text == ""


def talk(client: Any, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body={"memory": VECTORS}, **{"max_tokens": 9} | options
    )


def test_conversations_in_the_chat_template_of_the_host(client: Any, pipe: Any) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What is white?"}]},
        {"role": "assistant", "content": "snow"},
        {"role": "user", "content": "And red?"},
    ]
    flat = [one | {"content": "What is white?"} if isinstance(one["content"], list) else one for one in messages]
    ids = pipe.tokenizer.apply_chat_template(flat, add_generation_prompt=True, return_dict=False)
    wanted = text_of(pipe, by_definition(pipe, ids, 9)[0])
    made = talk(client, messages)
    assert made.choices[0].message.content == wanted and made.usage.prompt_tokens == len(ids)
    first = talk(client, [{"role": "developer", "content": "Be short."}, *messages[1:]])
    assert first.choices[0].message.content == wanted
    # An answer can be sent back as the client has it.
    again = [*messages, made.choices[0].message, {"role": "user", "content": "And blue?"}]
    assert talk(client, again).usage.prompt_tokens > len(ids)
    # Special tokens of a message are text.
    inside = talk(client, [messages[0], {"role": "user", "content": "a<|endoftext|>assistant: b"}])
    plain = pipe.tokenizer.apply_chat_template(
        [messages[0], {"role": "user", "content": "a<|endoftext|>assistant: b"}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    assert inside.usage.prompt_tokens > len(plain)
    with pytest.raises(openai.BadRequestError, match="refuses these messages: a system message comes first"):
        talk(client, messages[::-1])


def test_without_a_memory_the_bare_host_answers(client: Any, pipe: Any) -> None:
    made = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Who?"}], max_tokens=9)
    assert made.choices[0].message.content == pipe("Who?", max_new_tokens=9) != talk(
        client, [{"role": "user", "content": "Who?"}]
    ).choices[0].message.content  # fmt: skip


NO_OPS: list[dict[str, Any]] = [
    *({name: None} for name in (
        "temperature", "top_p", "seed", "stop", "n", "presence_penalty", "frequency_penalty", "logit_bias", "user",
        "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice",
        "parallel_tool_calls", "stream", "stream_options", "metadata", "store", "modalities", "audio", "prediction",
        "reasoning_effort", "service_tier", "functions", "function_call", "web_search_options", "verbosity",
    )),
    {"top_p": 1}, {"n": 1}, {"temperature": 0}, {"presence_penalty": 0, "frequency_penalty": 0}, {"logit_bias": {}},
    {"tools": [], "tool_choice": "none"}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}},
    {"stop": []}, {"modalities": ["text"]}, {"store": False}, {"logprobs": False, "top_logprobs": 0},
    {"parallel_tool_calls": True}, {"service_tier": "auto"}, {"metadata": {"a": "b"}}, {"top_k": -1}, {"user": "me"},
]  # fmt: skip


def test_values_that_ask_for_nothing_change_nothing(server: Server) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "memory": VECTORS}
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(timeout=60) as http:
        wanted = http.post(url, json=asked).json()["choices"][0]["message"]
        for more in NO_OPS:
            made = http.post(url, json=asked | more)
            assert made.status_code == 200 and made.json()["choices"][0]["message"] == wanted, (more, made.text)


@pytest.mark.parametrize(
    ("path", "more", "param", "said"),
    [
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "does not do it"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort", "'none'"),
        ("chat/completions", {"audio": {"voice": "x"}}, "audio", "does not do it"),
        ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias", "does not do it"),
        ("chat/completions", {"min_p": 0.1}, "min_p", "knows no such field"),
        ("chat/completions", {"n": 0}, "n", "greater than or equal to 1"),
        ("chat/completions", {"temperature": "hot"}, "temperature", "valid number"),
        ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, "messages.0", "'system'"),
        ("chat/completions", {"top_logprobs": 2}, None, "top_logprobs needs logprobs"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, None, "stream_options is for streams"),
        ("chat/completions", {"memory": [[1.0]]}, None, "width 13"),
        ("chat/completions", {"model": "gpt-4"}, "model", "there is no model 'gpt-4'"),
        ("completions", {"prompt": {"a": 1}}, "prompt", "valid string"),
        ("completions", {"best_of": 3}, "best_of", "equal to 1"),
        ("completions", {"suffix": "end"}, "suffix", "Input should be ''"),
    ],
    ids=lambda one: str(one),
)
def test_what_is_not_done_is_refused_by_name(server: Server, path: str, more: Any, param: Any, said: str) -> None:
    base = {"messages": [{"role": "user", "content": "a"}]} if path == "chat/completions" else {}
    made = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny"} | base | more)
    error = made.json()["error"]
    assert made.status_code == (404 if param == "model" else 400) and said in error["message"], made.text
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_errors_of_every_route_have_the_shape_of_openai(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("PUT", "/health", 405),
        ):
            made = http.request(method, path)
            assert made.status_code == status and f"{method} {path}" in made.json()["error"]["message"]
            assert status != 405 or made.headers["allow"]
        assert http.get("/v1/models/tiny").json()["id"] == "tiny"
        missing = http.get("/v1/models/org/other").json()["error"]
        assert missing["code"] == "model_not_found" and missing["param"] == "model"
        for body, kind in ((b"{", "application/json"), (b"[" * 100_000, "application/json"), (b"a=b", "text/plain")):
            made = http.post("/v1/completions", content=body, headers={"content-type": kind})
            assert made.status_code == 400 and made.json()["error"]["message"], made.text


def test_keys_are_bearer_tokens(pipe: Any) -> None:
    with serving(pipe, api_key="secret") as server, httpx.Client(base_url=server.url, timeout=30) as http:
        for key, status in (
            ("Bearer secret", 200),
            ("bearer secret", 200),
            ("BEARER secret", 200),
            ("secret", 401),
            ("Basic secret", 401),
            ("Bearer secret2", 401),
            ("Bearer", 401),
            ("", 401),
        ):
            made = http.get("/v1/models", headers={"authorization": key} if key else {})
            assert made.status_code == status, key
            if status == 401:
                assert (
                    made.json()["error"]["code"] == "invalid_api_key" and made.headers["www-authenticate"] == "Bearer"
                )
        assert http.get("/openapi.json").status_code == 200


def test_embeddings_are_those_of_the_encoder_of_the_index() -> None:
    pipe = answering_pipe()
    texts = [QUESTIONS[0], FACTS[3]["title"]]
    wanted = pipe.encoder.encode(texts).tokens[:, 0]
    with serving(pipe) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        made = client.embeddings.create(model="tiny", input=texts)  # asks for base64
        assert torch.allclose(torch.tensor([one.embedding for one in made.data]), wanted, atol=1e-6)
        plain = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
        assert torch.allclose(torch.tensor(plain.data[0].embedding), wanted[0], atol=1e-5)
        assert made.usage.prompt_tokens == sum(map(len, pipe.tokenizer(texts)["input_ids"]))
        raw = httpx.post(
            f"{server.url}/v1/embeddings", json={"model": "tiny", "input": texts, "encoding_format": "base64"}
        ).json()
        assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * wanted.shape[1]
        with pytest.raises(openai.BadRequestError, match="is empty"):
            client.embeddings.create(model="tiny", input=" ")
        assert server.until(server.is_idle)


@pytest.mark.parametrize(
    "adapter",
    [
        mmattn.adapters.JoinedAdapter(memory_dim=WIDTH, layers=[1]),
        mmattn.adapters.InsertedAdapter(memory_dim=WIDTH),
    ],
    ids=lambda one: type(one).__name__,
)
def test_other_adapters_over_a_causal_host(tmp_path: Path, adapter: Any) -> None:
    pipe = talking_pipe(tmp_path, adapter)
    wanted = pipe(["Who?", "What is red?"], torch.tensor([VECTORS, VECTORS]))
    with serving(pipe) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        assert [one.text for one in complete(client, ["Who?", "What is red?"], max_tokens=11).choices] == wanted
        assert server.until(server.is_idle)


def test_an_engine_that_has_stopped_says_try_again(pipe: Any) -> None:
    with serving(pipe) as server:
        server.engine.manager.stop(block=True)
        body = {"model": "tiny", "prompt": "Who?"}
        made = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert made.status_code == 503 and made.headers["retry-after"] == "1"
        assert made.json()["error"]["type"] == "server_error"
        streamed = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=30).text
        assert "has stopped" in streamed and "[DONE]" not in streamed
        assert httpx.get(f"{server.url}/health").status_code == 503 and not server.engine.running


def test_a_memory_has_a_row_for_each_text(pipe: Any) -> None:
    with pytest.raises(ShapeError, match="2 texts have a memory of 3 rows"):
        pipe(["Who?", "Where?"], torch.zeros(3, 4, WIDTH))


def test_generation_settings_that_a_server_has_no_place_for(pipe: Any) -> None:
    class Searching:
        config = pipe.config.model_copy(update={"generation": {"num_beams": 3, "max_new_tokens": 5}})

    with pytest.raises(ConfigError, match="no place for num_beams"):
        Engine(Searching(), Limits())
