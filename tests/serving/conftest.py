"""A server in the chat of a small language model, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving.servers import Server, serving, talking_pipe


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
