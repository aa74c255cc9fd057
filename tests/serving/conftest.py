"""A server in the chat of a small language model, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.serving.servers import Server


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.serving.servers import talking_pipe  # the environment of vLLM has not all that this needs

    return talking_pipe(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def server(pipe: Any) -> Iterator[Server]:
    from tests.serving.servers import serving

    with serving(pipe, max_requests=37, max_tokens=40) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as asks:
        yield asks
    assert server.until(server.is_idle), "a request or its memory is left behind"
