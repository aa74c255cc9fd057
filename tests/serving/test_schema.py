"""The schema of a server says before a request is sent whether each of its fields is accepted."""

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


#: What is asked: accepted; refused by the schema; refused beyond it, by a rule over several fields.
OK, REFUSED, BEYOND = "accepted", "refused", "refused beyond the schema"
Cases = list[tuple[str, dict[str, Any], str]]
#: Of every server: path, body without model, and what becomes of it.
EVERY: Cases = [
    (CHAT, {"max_tokens": 7, "max_completion_tokens": 2}, OK),
    (CHAT, {"max_tokens": 2.0, "top_k": 3.0, "n": 1.0, "seed": 5.0}, OK),
    (CHAT, {"max_tokens": 2.5}, REFUSED),
    (CHAT, {"max_tokens": 41}, OK),
    (CHAT, {"max_completion_tokens": -3}, REFUSED),
    (CHAT, {"max_completion_tokens": 41, "max_tokens": 2}, OK),
    (CHAT, {"n": 8}, REFUSED),
    (CHAT, {"top_k": -2}, REFUSED),
    (CHAT, {"seed": 2**63}, REFUSED),
    (CHAT, {"seed": 2**63 - 1, "top_k": 10**30, "temperature": 1, "n": 7}, OK),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, REFUSED),
    (CHAT, {"top_logprobs": 2}, BEYOND),
    (CHAT, {"top_logprobs": 2, "logprobs": True}, OK),
    (CHAT, {"stream_options": {}, "stream": False}, BEYOND),
    (CHAT, {"stream_options": None, "stream": None, "top_logprobs": None}, OK),
    (COMPLETION, {"max_tokens": 0, "echo": True, "logprobs": 3}, OK),
    (COMPLETION, {"max_tokens": -1}, REFUSED),
    (COMPLETION, {"logprobs": 21}, REFUSED),
    (COMPLETION, {"best_of": 2}, REFUSED),
    (COMPLETION, {"prompt": [-1]}, REFUSED),
    (COMPLETION, {"n": 3, "prompt": ["a", "b"]}, OK),
    (COMPLETION, {"n": 4, "prompt": ["a", "b"]}, BEYOND),
    (COMPLETION, {"prompt": [5.0, 7]}, OK),
    (COMPLETION, {"prompt": [5, 5000]}, REFUSED),
    (COMPLETION, {"prompt": [[5], [5000]]}, REFUSED),
]
MEMORIES: Cases = [
    (COMPLETION, {"memory": vectors(3)}, REFUSED),
    (COMPLETION, {"memory": []}, REFUSED),
    (COMPLETION, {"memory": "wide", "prompt": " \n"}, OK),
    (COMPLETION, {"memory": "huge"}, REFUSED),
    (CHAT, {"memory": "wide", "messages": [user(" ")]}, OK),
]
TALKING: Cases = [
    (CHAT, {"messages": [user("")]}, OK),
    (CHAT, {"messages": [seen(PICTURE)]}, REFUSED),
    (CHAT, {"messages": [{"role": "system", "content": "a"}, user("b")]}, OK),
    (COMPLETION, {"image": PICTURE}, REFUSED),
    (COMPLETION, {"documents": FACTS[:1]}, REFUSED),
    (COMPLETION, {"passages": 1}, REFUSED),
]
ANSWERING: Cases = [
    (CHAT, {"messages": [user([{"type": "text", "text": " "}])]}, BEYOND),
    (CHAT, {"messages": [user([{"type": "text", "text": " "}, {"type": "text", "text": "a"}])]}, OK),
    (CHAT, {"messages": [user("a"), user("b")]}, BEYOND),
    (CHAT, {"messages": [seen(PICTURE)]}, REFUSED),
    (COMPLETION, {"prompt": ["a", " "]}, BEYOND),
    (COMPLETION, {"documents": [FACTS[0] | {"id": [1]}, FACTS[0] | {"id": [1]}]}, OK),
    (COMPLETION, {"documents": [FACTS[0] | {"text": [1]}]}, REFUSED),
    (COMPLETION, {"documents": [FACTS[0] | {"text": None}, FACTS[0] | {"text": ""}]}, OK),
    (COMPLETION, {"documents": [FACTS[0] | {"title": " "}]}, REFUSED),
    (COMPLETION, {"documents": [{"title": "a"}]}, REFUSED),
    (COMPLETION, {"documents": FACTS[:4]}, REFUSED),
    (COMPLETION, {"passages": 1}, OK),
    (CHAT, {"passages": 0}, REFUSED),
    (CHAT, {"passages": 1, "memory": "wide"}, REFUSED),
    ("embeddings", {"input": ["a", "b"]}, OK),
    ("embeddings", {"input": ["a", ""]}, REFUSED),
    ("embeddings", {"input": "a", "dimensions": 3}, REFUSED),
]
CAPTIONING: Cases = [
    (CHAT, {"messages": [seen(PICTURE)]}, OK),
    (CHAT, {"messages": [seen(PICTURE, PICTURE)]}, BEYOND),
    (CHAT, {"messages": [seen("http://a/b.png")]}, REFUSED),
    (CHAT, {"messages": [seen(PICTURE)], "memory": "wide"}, BEYOND),
    (CHAT, {"messages": [user("a")]}, BEYOND),
    (COMPLETION, {}, BEYOND),
    (COMPLETION, {"image": PICTURE}, OK),
    (COMPLETION, {"image": "daisy.png"}, REFUSED),
]


@pytest.fixture(scope="module", params=["talking", "answering", "captioning"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[Any]]]:
    """A server, and what is asked of it."""
    folder = tmp_path_factory.mktemp("pipe")
    if request.param == "talking":
        pipe, cases = talking_pipe(folder, prompt="user: {question}<|endoftext|>assistant:"), EVERY + MEMORIES + TALKING
    elif request.param == "answering":
        pipe = answering_pipe()
        unread = [(path, body, REFUSED) for path, body, _ in MEMORIES]  # its memory has scores, which a request has not
        cases = EVERY + unread + ANSWERING
    else:
        pipe = captioning_pipe(folder)
        given = [(path, {"memory": "wide"} | body, outcome) for path, body, outcome in EVERY]
        cases = given + MEMORIES + CAPTIONING
    with serving(pipe, max_requests=7, max_tokens=40, max_documents=3) as server:
        yield server, cases


def test_what_the_schema_says_is_what_the_server_does(served: tuple[Server, list[Any]]) -> None:
    """Invariant 178."""
    server, cases = served
    width = server.engine.pipe.model.adapter(server.engine.pipe.model.active[0]).config.memory_dim
    schema = httpx.get(f"{server.url}/openapi.json").json()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for path, more, outcome in cases:
            plain = {CHAT: {"messages": [user("Who?")]}, COMPLETION: {"prompt": "Who?"}}.get(path, {})
            body = {"model": "tiny"} | ({} if path == "embeddings" else {"max_tokens": 2}) | plain | more
            if body.get("memory") in ("wide", "huge"):
                body["memory"] = vectors(width, 0.5 if body["memory"] == "wide" else 1e39)
            content = schema["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            fits = jsonschema.Draft202012Validator(content | {"components": schema["components"]}).is_valid(body)
            made = http.post(f"/v1/{path}", json=body)
            wanted = (200 if outcome == OK else 400, outcome != REFUSED)
            assert (made.status_code, fits) == wanted, (path, more, made.text[:300])
    assert server.until(server.is_idle)
