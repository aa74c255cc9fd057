"""The schema of a server says before a request is sent whether it is taken: of every field and of fields together."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.serving.servers import FACTS, Server, answering_pipe, captioning_pipe, serving, talking_pipe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
CHAT, COMPLETION = "chat/completions", "completions"
PICTURE = "data:image/png;base64," + base64.b64encode(Path("assets/pictures/digits.png").read_bytes()).decode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def seen(*urls: str) -> dict[str, Any]:
    return user([{"type": "image_url", "image_url": {"url": url}} for url in urls])


def vectors(width: int, value: float = 0.5) -> list[list[float]]:
    return [[value] * width] * 3


#: Of every server: path, body without model, and whether it is taken.
EVERY: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 2}, True),
    (CHAT, {"max_tokens": 7, "max_completion_tokens": 2}, True),
    (CHAT, {"max_tokens": 2.0, "top_k": 3.0, "n": 1.0, "seed": 5.0}, True),
    (CHAT, {"max_tokens": 2.5}, False),
    (CHAT, {"max_tokens": 41}, False),
    (CHAT, {"max_tokens": 0}, False),
    (CHAT, {"max_completion_tokens": -3}, False),
    (CHAT, {"max_completion_tokens": 41, "max_tokens": 2}, False),
    (CHAT, {"n": 0}, False),
    (CHAT, {"top_k": -2}, False),
    (CHAT, {"seed": 2**63}, False),
    (CHAT, {"seed": 2**63 - 1}, True),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, False),
    (COMPLETION, {"max_tokens": 0}, True),
    (COMPLETION, {"max_tokens": -1}, False),
    (COMPLETION, {"logprobs": 21}, False),
    (COMPLETION, {"best_of": 2}, False),
    (COMPLETION, {"prompt": [-1]}, False),
    (CHAT, {"top_k": 10**30, "temperature": 1}, True),
    (CHAT, {"stream_options": {"include_usage": True}}, False),
    (CHAT, {"stream_options": {}, "stream": False}, False),
    (CHAT, {"stream_options": None, "stream": None}, True),
    (CHAT, {"top_logprobs": 2}, False),
    (CHAT, {"top_logprobs": 2, "logprobs": True}, True),
    (CHAT, {"top_logprobs": None}, True),
    (CHAT, {"top_logprobs": 0}, True),
    (CHAT, {"n": 7}, True),
    (CHAT, {"n": 8}, False),
    (COMPLETION, {"n": 3, "prompt": ["a", "b"]}, True),
    (COMPLETION, {"n": 4, "prompt": ["a", "b"]}, False),
    (COMPLETION, {"n": 2, "prompt": [[5], [7], [9], [11]]}, False),
    (COMPLETION, {"n": 7, "prompt": [5, 7, 9, 11, 13]}, True),
    (COMPLETION, {"prompt": ["a"] * 8}, False),
    (COMPLETION, {"prompt": [5.0, 7]}, True),
    (COMPLETION, {"prompt": [5, 5000]}, False),
    (COMPLETION, {"prompt": [[5], [5000]]}, False),
    (COMPLETION, {"prompt": [2**31]}, False),
    (COMPLETION, {"logprobs": 3, "echo": True}, True),
]
MEMORIES: list[tuple[str, dict[str, Any], bool]] = [
    (COMPLETION, {"memory": vectors(3)}, False),
    (COMPLETION, {"memory": []}, False),
    (COMPLETION, {"memory": "wide", "prompt": ""}, True),
    (COMPLETION, {"memory": "wide", "prompt": " \n"}, True),
    (COMPLETION, {"memory": "huge"}, False),
    (CHAT, {"memory": "wide", "messages": [user(" ")]}, True),
]
TALKING: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, {"messages": [user("")]}, True),
    (CHAT, {"messages": [seen(PICTURE)]}, False),
    (CHAT, {"messages": [{"role": "system", "content": "a"}, user("b")]}, True),
    (CHAT, {"messages": [{"role": "system", "content": "a"}]}, True),
    (COMPLETION, {"image": PICTURE}, False),
    (COMPLETION, {"documents": FACTS[:1]}, False),
]
ANSWERING: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, {"messages": [user("\u001c\u0085 ")]}, False),
    (CHAT, {"messages": [user([{"type": "text", "text": " "}])]}, False),
    (CHAT, {"messages": [user([{"type": "text", "text": " "}, {"type": "text", "text": "a"}])]}, True),
    (CHAT, {"messages": [user("a"), user("b")]}, False),
    (CHAT, {"messages": [{"role": "system", "content": "a"}]}, False),
    (CHAT, {"messages": [seen(PICTURE)]}, False),
    (COMPLETION, {"prompt": ""}, False),
    (COMPLETION, {"prompt": ["a", " "]}, False),
    (COMPLETION, {"documents": FACTS[:1]}, True),
    (COMPLETION, {"documents": [FACTS[0] | {"id": [1]}, FACTS[0] | {"id": [1]}]}, True),
    (COMPLETION, {"documents": [FACTS[0] | {"text": [1]}]}, False),
    (COMPLETION, {"documents": [FACTS[0] | {"text": {}}]}, False),
    (COMPLETION, {"documents": [FACTS[0] | {"text": None}, FACTS[0] | {"text": ""}]}, True),
    (COMPLETION, {"documents": [FACTS[0] | {"title": " "}]}, False),
    (COMPLETION, {"documents": [{"title": "a"}]}, False),
    (COMPLETION, {"documents": FACTS[:1], "memory": "wide"}, False),
    (COMPLETION, {"documents": FACTS[:4]}, False),
    ("embeddings", {"input": ["a", "b"]}, True),
    ("embeddings", {"input": ["a", ""]}, False),
    ("embeddings", {"input": []}, False),
    ("embeddings", {"input": "a", "dimensions": 3}, False),
]
CAPTIONING: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, {"messages": [seen(PICTURE)]}, True),
    (CHAT, {"messages": [seen(PICTURE, PICTURE)]}, False),
    (CHAT, {"messages": [seen("http://a/b.png")]}, False),
    (CHAT, {"messages": [seen(PICTURE)], "memory": "wide"}, False),
    (CHAT, {"messages": [user("a")]}, False),
    (COMPLETION, {}, False),
    (COMPLETION, {"image": PICTURE}, True),
    (COMPLETION, {"image": "daisy.png"}, False),
    (COMPLETION, {"image": PICTURE, "memory": "wide"}, False),
]


@pytest.fixture(scope="module", params=["talking", "answering", "captioning"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[Any]]]:
    """A server, and what is asked of it."""
    folder = tmp_path_factory.mktemp("pipe")
    if request.param == "talking":
        pipe, cases = talking_pipe(folder, prompt="user: {question}<|endoftext|>assistant:"), EVERY + MEMORIES + TALKING
    elif request.param == "answering":
        pipe = answering_pipe()
        unread = [(path, body, False) for path, body, _ in MEMORIES]  # its memory has scores, which a request has not
        cases = EVERY + unread + ANSWERING
    else:
        pipe = captioning_pipe(folder)
        given = [(path, {"memory": "wide"} | body, valid) for path, body, valid in EVERY]
        cases = given + MEMORIES + CAPTIONING
    with serving(pipe, max_requests=7, max_tokens=40, max_documents=3) as server:
        yield server, cases


def test_what_the_schema_says_is_what_the_server_does(served: tuple[Server, list[Any]]) -> None:
    """Invariant 178."""
    server, cases = served
    width = server.engine.pipe.model.adapter(server.engine.pipe.model.active[0]).config.memory_dim
    schema = httpx.get(f"{server.url}/openapi.json").json()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for path, more, valid in cases:
            plain = {CHAT: {"messages": [user("Who?")]}, COMPLETION: {"prompt": "Who?"}}.get(path, {})
            short = {} if path == "embeddings" else {"max_tokens": 2}
            body = {"model": "tiny"} | short | plain | more
            if body.get("memory") in ("wide", "huge"):
                body["memory"] = vectors(width, 0.5 if body["memory"] == "wide" else 1e39)
            content = schema["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            fits = jsonschema.Draft202012Validator(content | {"components": schema["components"]}).is_valid(body)
            made = http.post(f"/v1/{path}", json=body)
            assert (made.status_code, fits) == (200 if valid else 400, valid), (path, more, made.text[:300])
    assert server.until(server.is_idle)
