"""Clients of the field against a running server: langchain, litellm, and schemathesis over the schema it serves."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.serving.servers import Server, answering_pipe, serving, talking_pipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def server(pipe: Any) -> Iterator[Server]:
    with serving(pipe, api_key="secret", max_requests=37, max_tokens=256) as server:
        yield server
        assert server.until(server.is_idle), "a request or its memory is left behind"


def apart(function: Any, *args: Any) -> None:
    """Run a client in a process of its own: these leave connections and event loops open."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(function, *args).result(120)


def call_langchain(url: str, wanted: dict[str, str]) -> None:
    """Its chat and completion classes with the defaults that they send."""
    import langchain_openai as langchain

    settings: dict[str, Any] = {"model": "tiny", "base_url": url, "api_key": "secret"}
    white = wanted["What is white?"]
    chat = langchain.ChatOpenAI(**settings)
    assert chat.invoke("What is white?").content == white
    assert "".join(str(piece.content) for piece in chat.stream("What is white?")).strip() == white
    said = chat.invoke([("system", "Be short."), ("human", "What is white?")])
    assert chat.invoke([("human", "What is white?"), said, ("human", "And red?")]).usage_metadata["output_tokens"] > 0
    assert chat.bind(stop=[white.split()[1]]).invoke("What is white?").content == white.split()[0]
    sampled = langchain.ChatOpenAI(**settings, temperature=1.1, seed=5, top_p=0.9, n=2, max_tokens=7)
    assert sampled.invoke("What is white?").content == sampled.invoke("What is white?").content
    complete = langchain.OpenAI(**settings, temperature=0, max_tokens=11)
    assert complete.invoke("What is white?") == white
    assert [row[0].text for row in complete.generate(list(wanted)).generations] == list(wanted.values())
    langchain.OpenAI(**settings).invoke("What is white?")


def call_litellm(url: str, wanted: str, memory: list[list[float]], seen: str) -> None:
    """Whole, streamed, with a memory, and its errors."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    settings: dict[str, Any] = {"model": "openai/tiny", "api_base": url, "api_key": "secret"}
    asked = [{"role": "user", "content": "What is white?"}]
    assert litellm.completion(messages=asked, **settings).choices[0].message.content == wanted
    pieces = litellm.completion(messages=asked, stream=True, stream_options={"include_usage": True}, **settings)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices).strip() == wanted
    answer = litellm.completion(messages=asked, extra_body={"memory": memory}, **settings)
    assert answer.choices[0].message.content == seen
    with pytest.raises(litellm.NotFoundError, match="there is no model"):
        litellm.completion(messages=asked, **settings | {"model": "openai/other"})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=asked, **settings | {"api_key": "wrong"})


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_langchain(server: Server, pipe: Any) -> None:
    apart(call_langchain, f"{server.url}/v1", {question: pipe(question) for question in ("What is white?", "Who?")})


@pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed")
def test_litellm(server: Server, pipe: Any) -> None:
    memory = torch.randn(3, 13).tolist()
    seen = pipe("What is white?", torch.tensor([memory]))
    apart(call_litellm, f"{server.url}/v1", pipe("What is white?"), memory, seen)


@pytest.mark.parametrize("kind", ["memory-to-text", "question-answering"])
def test_the_schema_is_true(kind: str, tmp_path: Path) -> None:
    """Every answer is documented, refusals included; whether a question is empty, the schema cannot say."""
    pytest.importorskip("schemathesis")
    pipe = answering_pipe() if kind == "question-answering" else talking_pipe(tmp_path, prompt="user:")
    with serving(pipe, api_key="secret", max_requests=37, max_tokens=40) as server:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color",
            "--header", "Authorization: Bearer secret", "--max-examples", "150", "--seed", "7",
            "--exclude-checks", "positive_data_acceptance", "--continue-on-failure",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        (cases,) = re.findall(r"(\d+) generated", done.stdout)
        figures = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer secret"}).text
        answered = re.findall(r'requests_total{path="/v1/(?:chat/)?completions",status="200"} (\d+)', figures)
        print(f"{kind}: {cases} cases, all answered as the schema says")
        assert int(cases) >= 500 and len(answered) == 2 and min(map(int, answered)) > 10, (cases, figures)
        assert server.until(server.is_idle, 60)
