"""The server, by real clients over HTTP: what it answers, what it refuses, and that nothing is left behind.

Invariants 86, 87.
"""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from PIL import Image

import mmattn
from mmattn import models
from mmattn.errors import ConfigError
from mmattn.serving import Engine, Limits
from tests.models.test_pretrained import need
from tests.serving.servers import FACTS, QUESTIONS, Server, answering_pipe, captioning_pipe, serving

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
PICTURES = [Path(f"assets/flora/{name}.png") for name in ("snowdrop", "cornflower")]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return answering_pipe()


@pytest.fixture(scope="module")
def server(pipe: Any) -> Iterator[Server]:
    with serving(pipe, max_requests=16, max_tokens=40) as server:
        yield server


def asking(server: Server) -> openai.OpenAI:
    """A client, to be closed."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def data_url(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def asked(question: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def test_answers_are_those_of_the_pipeline(client: Any, pipe: Any) -> None:
    for question in QUESTIONS[:3]:
        wanted = pipe(question).text
        made = client.chat.completions.create(model="tiny", messages=asked(question))
        assert made.choices[0].message.content == wanted and made.choices[0].finish_reason == "stop"
        assert made.usage.completion_tokens > 0
        assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
        assert client.completions.create(model="tiny", prompt=question).choices[0].text == wanted
    assert [one.id for one in client.models.list()] == ["tiny"]


def test_streams(client: Any, pipe: Any) -> None:
    wanted = pipe(QUESTIONS[7]).text
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=asked(QUESTIONS[7]), stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]).rstrip() == wanted
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
    assert len(chunks) > 3 and chunks[-1].usage.completion_tokens > 2
    texts = client.completions.create(model="tiny", prompt=QUESTIONS[7], stream=True)
    assert "".join(one.choices[0].text for one in texts).rstrip() == wanted


def test_passages(client: Any, pipe: Any) -> None:
    question = QUESTIONS[3]
    wanted = [pipe(question, passages=count).text for count in (1, 2)]
    for count, text in enumerate(wanted, 1):
        made = client.completions.create(model="tiny", prompt=question, extra_body={"passages": count})
        assert made.choices[0].text.strip() == text


def test_an_answer_ends_at_the_limit_of_the_server_or_of_the_model(tmp_path: Path) -> None:
    pipe = captioning_pipe(tmp_path / "adapter")
    pipe.config = pipe.config.model_copy(update={"prompt": "A photo of {question}"})
    with serving(pipe, max_tokens=23) as server, asking(server) as client:
        positions = pipe.model.config.max_position_embeddings
        for length, room in ((5, 23), (positions - 7, 7)):
            extra = {"image": data_url(PICTURES[0])}
            made = client.completions.create(model="tiny", prompt=[5] * length, max_tokens=4096, extra_body=extra)
            assert (made.choices[0].finish_reason, made.usage.completion_tokens) == ("length", room)
        with pytest.raises(openai.BadRequestError, match=f"{positions} positions"):
            client.completions.create(model="tiny", prompt=[5] * positions, extra_body=extra)


def test_documents_and_vectors_with_the_request(client: Any, pipe: Any) -> None:
    """They take the place of the index; each request has its own."""
    from mmattn.pipelines.question_answering import build_index

    documents = [{"title": FACTS[2]["title"], "value": FACTS[5]["value"]}, FACTS[6]]
    own = pipe(QUESTIONS[2], index=build_index(documents, pipe.config, pipe.encoder)).text
    assert own != pipe(QUESTIONS[2]).text
    made = client.chat.completions.create(
        model="tiny", messages=asked(QUESTIONS[2]), extra_body={"documents": documents}
    )
    assert made.choices[0].message.content == own
    with pytest.raises(openai.BadRequestError, match="entry 0 has no value"):
        client.completions.create(model="tiny", prompt="a", extra_body={"documents": [{"title": "x"}]})


def test_embeddings_are_those_of_the_encoder_of_the_index(server: Server, client: Any, pipe: Any) -> None:
    texts = [QUESTIONS[0], FACTS[3]["title"]]
    wanted = pipe.encoder.encode(texts).tokens[:, 0]
    made = client.embeddings.create(model="tiny", input=texts)  # asks for base64
    assert torch.allclose(torch.tensor([one.embedding for one in made.data]), wanted, atol=1e-6)
    plain = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
    assert torch.allclose(torch.tensor(plain.data[0].embedding), wanted[0], atol=1e-5)
    assert made.usage.prompt_tokens == sum(map(len, pipe.tokenizer(texts)["input_ids"]))
    body = {"model": "tiny", "input": texts, "encoding_format": "base64"}
    raw = httpx.post(f"{server.url}/v1/embeddings", json=body).json()
    assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * wanted.shape[1]
    with pytest.raises(openai.BadRequestError, match="is empty"):
        client.embeddings.create(model="tiny", input=" ")


def test_many_at_once(server: Server, pipe: Any) -> None:
    """Invariant 86: sixteen clients, each with its own question; every answer is that of its own memory."""
    wanted = {question: pipe(question).text for question in QUESTIONS[:16]}

    def ask(question: str) -> bool:
        made = client.chat.completions.create(model="tiny", messages=asked(question))
        return made.choices[0].message.content == wanted[question]

    with asking(server) as client, ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, wanted))
    assert server.until(server.is_idle)


WIDE = [[float("nan")] * 384]


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"messages": asked("a"), "temperature": 2.1}, 400, "temperature"),
        ({"messages": asked(" ")}, 400, "the question is empty"),
        ({"messages": [{"role": "system", "content": "a"}, *asked("b")]}, 400, "no chat template"),
        ({"messages": asked("a"), "model": "gpt"}, 404, "'gpt'"),
        ({"messages": asked("word " * 5000)}, 400, "positions"),
        ({"messages": asked("a"), "memory": WIDE}, 400, "non-finite"),
        ({"messages": asked("a"), "memory": [[0.5] * 3]}, 400, "384"),
        ({"messages": asked("a"), "documents": []}, 400, "documents: List"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            400,
            "picture",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:1 texts are longer:UserWarning")
def test_what_is_refused(server: Server, body: dict[str, Any], status: int, named: str) -> None:
    """Invariant 86."""
    content, kind = json.dumps({"model": "tiny", **body}), {"content-type": "application/json"}
    made = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=kind)
    assert made.status_code == status and named in made.json()["error"]["message"], made.text
    assert server.until(server.is_idle)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"null", b'{"model": 3}', b"", b"[" * 100_000])
def test_broken_bodies(server: Server, content: bytes) -> None:
    made = httpx.post(f"{server.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert made.status_code == 400 and made.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_a_hundred_megabytes(server: Server, announced: bool) -> None:
    """Invariant 87: refused after as much as is taken, whether its length is announced or not."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as wire:
        length = b"Content-Length: 100000000" if announced else b"Transfer-Encoding: chunked"
        wire.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + length + b"\r\n\r\n"
        )
        sent, piece = 0, b"x" * 65536
        try:
            while sent < 100_000_000:
                wire.sendall(piece if announced else b"10000\r\n" + piece + b"\r\n")
                sent += len(piece)
        except OSError:
            pass  # the server has closed the connection
        assert sent < 40_000_000
    made = httpx.get(f"{server.url}/health")
    assert made.status_code == 200 and made.json()["running"] == 0


def test_too_many(server: Server) -> None:
    for _ in range(16):
        server.engine.enter()
    try:
        made = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert made.status_code == 429 and made.headers["retry-after"] == "1"
    finally:
        for _ in range(16):
            server.engine.leave()
    assert httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": QUESTIONS[0]}).status_code == 200


def test_a_request_that_takes_too_long(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 86."""
    monkeypatch.setattr(server.engine, "limits", replace(server.engine.limits, timeout=0.001))
    body = {"model": "tiny", "prompt": QUESTIONS[0]}
    made = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert made.status_code == 504 and "no answer within" in made.json()["error"]["message"]
    made = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=30)
    assert "no answer within" in made.text and "[DONE]" not in made.text
    assert server.until(server.is_idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes(server: Server, stream: bool) -> None:
    """Invariant 86."""
    body = json.dumps({"model": "tiny", "prompt": QUESTIONS[0], "stream": stream}).encode()
    lines = "POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(body)}"
    head = "\r\n".join([*lines, "", ""])
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as wire:
            wire.sendall(head.encode() + body)
            if stream:
                wire.recv(200)
            # Closed without reading: a reset.
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert server.until(server.is_idle)
    # What they wrote before they were cancelled is dropped with the end of the next request.
    assert httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": QUESTIONS[0]}).status_code == 200
    assert server.until(server.is_idle) and not server.unread()


def test_figures_and_logs(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Invariant 87."""
    with caplog.at_level(logging.INFO, "mmattn.serving"):
        httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": QUESTIONS[1]})
        assert server.until(lambda: any("completions" in one.getMessage() for one in caplog.records))
    said = [json.loads(one.getMessage()) for one in caplog.records if one.name == "mmattn.serving"]
    assert said[-1]["path"] == "/v1/completions" and said[-1]["status"] == 200 and said[-1]["seconds"] > 0
    assert FACTS[1]["title"] not in caplog.text and FACTS[1]["value"] not in caplog.text, "logs have no contents"
    text = httpx.get(f"{server.url}/metrics").text
    for name in (
        "mmattn_tokens_total",
        "mmattn_first_token_seconds_bucket",
        "mmattn_running_requests 0.0",
        "mmattn_memory_bytes 0.0",
    ):
        assert name in text
    assert httpx.get(f"{server.url}/v1/nothing").status_code == 404


def test_a_shutdown_finishes_what_runs(pipe: Any) -> None:
    with serving(pipe, max_tokens=40) as server, asking(server) as client:
        body = {"model": "tiny", "prompt": QUESTIONS[0]}
        wanted = client.completions.create(**body).choices[0].text
        texts: list[str] = []

        def read() -> None:
            for chunk in client.completions.create(**body, stream=True):
                texts.append(chunk.choices[0].text)

        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        assert server.until(lambda: server.engine.running == 4)
        server.uvicorn.should_exit = True
        for reader in readers:
            reader.join(30)
        assert "".join(texts).count(wanted.split()[0]) >= 4, "each stream came to its end"
    assert not server.engine.healthy()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_pictures(tmp_path: Path) -> None:
    """Invariant 87."""
    pipe = captioning_pipe(tmp_path / "adapter")
    wanted = pipe(PICTURES)
    assert wanted[0] != wanted[1]
    with serving(pipe) as server, asking(server) as client:

        def caption(url: str, text: str = "") -> str:
            content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
            made = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
            return str(made.choices[0].message.content)

        assert [caption(data_url(file)) for file in PICTURES] == wanted
        # A message instructs, which the adapter does not follow; a prompt starts the caption.
        assert caption(data_url(PICTURES[0]), "Describe the picture.") == wanted[0]
        for text, file in (("", PICTURES[1]), (" a red", PICTURES[0])):
            made = client.completions.create(model="tiny", prompt=text, extra_body={"image": data_url(file)})
            assert made.choices[0].text == pipe(file, text)
        for url, said in (
            ("http://127.0.0.1:1/a.png", "this server fetches no addresses"),
            ("file:///etc/passwd", "this server fetches no addresses"),
            ("data:image/png;base64,%%%", "no base64"),
            ("data:image/png;base64,aGVsbG8=", "picture"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                caption(url)
        with pytest.raises(openai.BadRequestError, match="describes a picture, and the request has none"):
            client.completions.create(model="tiny", prompt="a flower")
        with pytest.raises(openai.BadRequestError, match="reads no documents"):
            client.completions.create(model="tiny", prompt="", extra_body={"documents": FACTS})
        assert server.until(server.is_idle)


@pytest.mark.slow
def test_the_shipped_adapter_for_questions_answers_as_its_pipeline() -> None:
    """Many at once, with capital letters and question marks or without."""
    for name in ("smollm2", "efficientnet-lite0", "easy-vqa"):
        need(name)
    pipe, rows = mmattn.pipeline("assets/vqa", device="cpu"), models.load_easy_vqa("test")[::48]
    texts = [row.text.capitalize() if place % 2 else row.text[:-1] for place, row in enumerate(rows)]
    with serving(pipe) as server, asking(server) as client, ThreadPoolExecutor(8) as pool:

        def ask(row: Any, text: str) -> str:
            content = [
                {"type": "text", "text": text},
                {"type": "image_url", "image_url": {"url": data_url(row.picture)}},
            ]
            made = client.chat.completions.create(model="tiny", messages=asked(content))
            return str(made.choices[0].message.content)

        assert list(pool.map(ask, rows, texts)) == pipe([row.picture for row in rows], texts)


def test_a_slow_picture_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """One picture whose encoding waits for the answers about the others; one of too many pixels is not decoded."""
    pipe = captioning_pipe(tmp_path / "adapter")
    wanted, encode, answered = pipe(PICTURES), pipe.make_memory, threading.Event()

    def wait_for_the_others(pictures: list[Any]) -> Any:
        if pictures[0].size == (31, 37):
            assert answered.wait(60)
        return encode(pictures)

    pipe.make_memory = wait_for_the_others
    slow, huge = (tmp_path / f"{name}.png" for name in ("slow", "huge"))
    Image.new("RGB", (31, 37)).save(slow)
    Image.new("1", (5003, 5003)).save(huge)
    with serving(pipe) as server, ThreadPoolExecutor(1) as pool:

        def caption(file: Path) -> httpx.Response:
            body = {"model": "tiny", "image": data_url(file)}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=90)

        waiting = pool.submit(caption, slow)
        assert server.until(lambda: server.engine.running == 1)
        assert [caption(file).json()["choices"][0]["text"] for file in PICTURES] == wanted
        refused = caption(huge)
        assert refused.status_code == 400 and "25000000" in refused.json()["error"]["message"], refused.text
        answered.set()
        assert waiting.result().status_code == 200
        assert server.until(server.is_idle)


def test_a_client_whose_vectors_overflow(tmp_path: Path) -> None:
    """Invariant 114. Whether they do is a kernel's matter; the answers of the others are theirs."""
    pipe = captioning_pipe(tmp_path / "adapter")
    wanted = pipe(PICTURES)
    width = pipe.model.adapter("default").config.memory_dim
    bodies: list[dict[str, Any]] = [{"image": data_url(file)} for file in PICTURES]
    bodies.append({"memory": [[1e20] + [0.0] * (width - 1)] * 3})

    with serving(pipe) as server:

        def ask(number: int) -> bool:
            body = {"model": "tiny", "prompt": "", "max_tokens": 9, **bodies[number]}
            made = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            if number == 2 and made.status_code == 400:
                return "overflows in" in made.json()["error"]["message"]
            assert made.status_code == 200, made.text
            return number == 2 or made.json()["choices"][0]["text"] == wanted[number]

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(ask, [0, 2, 1, 2, 0, 2, 1, 2, 0, 1]))
        assert server.until(server.is_idle)


def test_settings_that_cannot_be(pipe: Any) -> None:
    with pytest.raises(ConfigError, match="max_requests"):
        Limits(max_requests=0)
    with pytest.raises(ConfigError, match="timeout"):
        Limits(timeout=0)

    class Drawing:
        config = pipe.config.model_copy(update={"task": "text-to-image"})

    with pytest.raises(ConfigError, match="is for text-to-image"):
        Engine(Drawing(), Limits())
