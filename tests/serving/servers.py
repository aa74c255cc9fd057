"""Servers for the tests: uvicorn in a thread, on a port of this machine, with small adapters that caption or answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import pipelines
from mmattn.pipelines.question_answering import build_index
from mmattn.recipes import find_recipe, load_recipe
from mmattn.serving import Engine, Limits, make_app
from tests import tiny

#: Facts that the shipped adapter was not trained on.
_HELD_OUT = load_recipe(find_recipe("rag").folder, "data").load_facts()[1][:24]
FACTS = [{"title": fact.title, "value": fact.value} for fact in _HELD_OUT]
QUESTIONS = [fact.question for fact in _HELD_OUT]


@dataclass
class Server:
    """A server that runs."""

    engine: Engine
    port: int
    uvicorn: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def until(self, condition: Any, seconds: float = 20.0) -> bool:
        """Whether something becomes true in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def is_idle(self) -> bool:
        """Nothing runs and no memory is held."""
        manager = self.engine.manager
        handlers = manager.output_router.result_handlers
        return not (self.engine.running or len(manager.memories) or manager.memories.nbytes() or handlers)

    def unread(self) -> int:
        """How many outputs wait that nobody reads."""
        return int(self.engine.manager.output_router.output_queue.qsize())


@contextlib.contextmanager
def serving(pipe: Any, api_key: str | None = None, **limits: Any) -> Iterator[Server]:
    """A server of a pipeline, until the block ends."""
    import uvicorn

    engine = Engine(pipe, Limits(**limits))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = uvicorn.Config(
        make_app(engine, "tiny", api_key), host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=20
    )
    server = Server(engine, port, uvicorn.Server(settings))
    thread = threading.Thread(target=server.uvicorn.run, daemon=True)
    thread.start()
    assert server.until(lambda: server.uvicorn.started, 60)
    try:
        yield server
    finally:
        server.uvicorn.should_exit = True
        thread.join(40)
        assert not thread.is_alive()


def answering_pipe() -> Any:
    """The facts adapter that ships, with an index of facts that it never saw."""
    pipe = mmattn.pipeline("assets/rag/adapter", device="cpu")
    pipe.index = build_index(FACTS, pipe.config, pipe.encoder)
    return pipe


def captioning_pipe(folder: Path) -> Any:
    """An adapter that was opened instead of trained, on the small language model and CLIP that ship."""
    encoder = mmattn.OpenCLIPEncoder("local-dir:assets/clip")
    host, tokenizer = pipelines.load_host(pipelines.ModelReference(name="assets/lm"), folder, torch.device("cpu"), None)
    settings = mmattn.GatedAdapter(memory_dim=encoder.dim, layers=(0, 2), num_heads=2, head_dim=8)
    model = tiny.open_gates(mmattn.attach(host, settings))
    model.save_adapter(folder, encoder=encoder.fingerprint)
    pipelines.PipelineConfig(
        task="image-to-text",
        host=pipelines.ModelReference.of("assets/lm", tokenizer),
        encoder=pipelines.EncoderReference(name="assets/clip"),
        prompt="A photo of",
        generation={"max_new_tokens": 9},
        trained_on="Nothing: its gates were opened by hand.",
    ).save(folder)
    return mmattn.pipeline(folder, device="cpu")


#: A chat in the tokens of `assets/lm`, whose messages end with the token that ends a text.
CHAT = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def talking_pipe(folder: Path, adapter: Any = None, prompt: str = "user: {question}<|endoftext|>assistant:") -> Any:
    """An adapter that reads vectors of width 13, opened instead of trained, on the small language model in a chat."""
    host, tokenizer = pipelines.load_host(pipelines.ModelReference(name="assets/lm"), folder, torch.device("cpu"), None)
    host.config.max_position_embeddings = 512  # clients ask for 256 tokens
    host.save_pretrained(folder / "host")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "host")
    settings = adapter or mmattn.GatedAdapter(memory_dim=13, layers=(0, 2), num_heads=2, head_dim=8)
    model = mmattn.attach(host, settings).eval()
    if adapter is None:
        tiny.open_gates(model)
    model.save_adapter(folder / "adapter")
    pipelines.PipelineConfig(
        task="memory-to-text",
        host=pipelines.ModelReference.of(str(folder / "host"), tokenizer),
        prompt=prompt,
        generation={"max_new_tokens": 11},
    ).save(folder / "adapter")
    return mmattn.pipeline(folder / "adapter", device="cpu")
