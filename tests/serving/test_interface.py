"""The interface of OpenAI, by its own client: prompts, conversations, embeddings and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import mmattn
from mmattn.errors import ConfigError, ShapeError
from mmattn.serving import Engine, Limits
from tests.serving.choosing import VECTORS, WIDTH, by_definition, complete, ids_of, text_of
from tests.serving.servers import Server, serving, talking_pipe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


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


DEFAULTS: list[dict[str, Any]] = [
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


def test_default_values_of_unsupported_fields_change_nothing(server: Server) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "memory": VECTORS}
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(timeout=60) as http:
        wanted = http.post(url, json=asked).json()["choices"][0]["message"]
        for more in DEFAULTS:
            made = http.post(url, json=asked | more)
            assert made.status_code == 200 and made.json()["choices"][0]["message"] == wanted, (more, made.text)


@pytest.mark.parametrize(
    ("path", "more", "param", "said"),
    [
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "does not support it"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort", "'none'"),
        ("chat/completions", {"audio": {"voice": "x"}}, "audio", "does not support it"),
        ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias", "does not support it"),
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
        made = http.post("/v1/completions", content=b"a=b", headers={"content-type": "text/plain"})
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
            ("Bearer sécret", 401),
            ("", 401),
        ):
            made = http.get("/v1/models", headers={"authorization": key.encode()} if key else {})
            assert made.status_code == status, key
            if status == 401:
                assert (
                    made.json()["error"]["code"] == "invalid_api_key" and made.headers["www-authenticate"] == "Bearer"
                )
        assert http.get("/metrics").status_code == 401
        assert http.get("/openapi.json").status_code == http.get("/health").status_code == 200


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


def test_generation_settings_that_a_server_does_not_support(pipe: Any) -> None:
    class Searching:
        config = pipe.config.model_copy(update={"generation": {"num_beams": 3, "max_new_tokens": 5}})

    with pytest.raises(ConfigError, match="does not support num_beams"):
        Engine(Searching(), Limits())
