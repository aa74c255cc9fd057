"""Servers under load, one after the other: time to the first token and tokens a second with streaming clients.

    python -m recipes.benchmarks.serving [--clients 64] [--seconds 60] [--vllm PYTHON]

SmolLM2 with a gated adapter at every fourth layer that reads pictures (49 slots), on `mmattn serve` and on vLLM, and
the bare host on `transformers serve`. The gates are open so little that every answer is the host's own: all servers
write the same texts, and an answer that differs from that of `generate` is counted. Clients ask for 32 tokens, again
and again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI, OpenAIError

import mmattn
from mmattn import pipelines
from mmattn.models import resolve

TOKENS, THEMES = 32, ("the sea", "a train", "winter", "bread", "an owl", "glass", "a garden", "the moon")
QUESTIONS = [f"Tell me a {kind} story about {theme}." for kind in ("short", "true", "sad") for theme in THEMES]


@dataclass
class Load:
    """Times and counts of the clients of one run."""

    first: list[float] = field(default_factory=list)  # seconds
    tokens: int = 0
    answers: int = 0
    wrong: int = 0
    failed: int = 0


def make_folder(folder: Path) -> pipelines.ImageToTextPipeline:
    """Save an adapter whose gates are nearly closed, with its pipeline; return that."""
    torch.manual_seed(0)
    host, tokenizer = pipelines.load_host(pipelines.ModelReference(name="smollm2"), folder, torch.device("cpu"), None)
    encoder = pipelines.load_image_encoder("efficientnet-lite0", torch.device("cpu"))
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=encoder.dim, every=4, feed_forward=0.5))
    with torch.no_grad():
        for name, parameter in model.adapters.named_parameters():
            if "gate" in name:
                parameter.fill_(1e-6)
    model.save_adapter(folder, encoder=encoder.fingerprint)
    chat = [{"role": "user", "content": "{question}"}]
    pipelines.PipelineConfig(
        task="image-to-text",
        host=pipelines.ModelReference.of("smollm2", tokenizer),
        encoder=pipelines.EncoderReference(name="efficientnet-lite0"),
        prompt=str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)),
        generation={"max_new_tokens": TOKENS},
    ).save(folder)
    pipe: pipelines.ImageToTextPipeline = mmattn.pipeline(folder, device="cpu")
    return pipe


def make_pictures(count: int) -> list[bytes]:
    """Return small pictures of noise as PNG."""
    from PIL import Image

    pictures, generator = [], torch.Generator().manual_seed(0)
    for _ in range(count):
        file = io.BytesIO()
        Image.fromarray(torch.randint(256, (64, 64, 3), generator=generator).byte().numpy()).save(file, "PNG")
        pictures.append(file.getvalue())
    return pictures


def content(question: str, picture: bytes) -> list[dict[str, Any]]:
    """Return the content of a message with a picture."""
    data = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": data}}]


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[str]:
    """Yield the address of a server while it runs; `command` ends with its options but the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with (folder / "server.log").open("a") as log:
        process = subprocess.Popen([*command, "--port", str(port)], env=env, stdout=log, stderr=log)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} does not start:\n{(folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


async def ask(client: AsyncOpenAI, model: str, content: Any, wanted: str, load: Load) -> None:
    """Stream one answer, and note what came."""
    begin, text, tokens = time.perf_counter(), "", 0
    messages: Any = [{"role": "user", "content": content}]
    try:
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=TOKENS, temperature=0, stream=True
        )
        async for event in stream:
            if event.choices and event.choices[0].delta.content:
                if not text:
                    load.first.append(time.perf_counter() - begin)
                text, tokens = text + event.choices[0].delta.content, tokens + 1
            tokens = event.usage.completion_tokens if event.usage else tokens
    except OpenAIError:
        load.failed += 1
        return
    load.tokens += tokens
    load.answers += 1
    load.wrong += text.strip() != wanted.strip()


async def clients(url: str, model: str, requests: list[Any], count: int, seconds: float) -> tuple[Load, float]:
    """Let clients ask until a time; return what they saw, and the seconds until the last answer."""
    load, begin = Load(), time.perf_counter()

    async def one(number: int) -> None:
        chance = random.Random(number)
        while time.perf_counter() - begin < seconds:
            await ask(client, model, *chance.choice(requests), load)

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        await asyncio.gather(*(ask(client, model, *requests[number], Load()) for number in range(4)))  # warm
        begin = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(count)))
    return load, time.perf_counter() - begin


def main() -> None:
    """Start each server in turn, load it, print a line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.serving", description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--vllm", help="python of the environment in which vLLM is installed")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    pipe = make_folder(folder / "adapter")
    host = str(resolve("smollm2"))
    pictures = make_pictures(len(QUESTIONS))
    answers = pipe(pictures, QUESTIONS)
    bare = list(zip(QUESTIONS, answers, strict=True))
    cases = [(content(*row), answer) for *row, answer in zip(QUESTIONS, pictures, answers, strict=True)]
    transformers = [str(Path(sys.executable).with_name("transformers")), "serve", host]
    batching = {"cb-block-size": 16, "cb-num-blocks": 4096, "cb-max-batch-tokens": 2048}
    transformers += ["--continuous-batching", "--device", "cpu", "--dtype", "float32"]
    transformers += [f"--{name}={value}" for name, value in batching.items()]
    ours = [sys.executable, "-m", "mmattn", "serve", str(folder / "adapter")]
    ours += ["--max-requests", "256", "--timeout", "300"]
    servers = [
        ("transformers serve, bare host", transformers, host, bare),
        ("mmattn serve, no pictures", ours, "adapter", bare),
        ("mmattn serve, a picture each", ours, "adapter", cases),
    ]
    if options.vllm:
        engine = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32"]
        engine += ["--max-num-seqs", "64", "--max-model-len", "1024"]
        named = [*engine, "--model", str(folder / "adapter"), "--served-model-name", "adapter"]
        servers += [
            ("vLLM, bare host", [*engine, "--model", host], host, bare),
            ("vLLM, no pictures", named, "adapter", bare),
            ("vLLM, a picture each", named, "adapter", cases),
        ]
    print(f"{options.clients} clients, {options.seconds:g} s, {TOKENS} tokens each, torch {torch.__version__}\n")
    print("| server | tokens/s | first token, median | p95 | answers | other text | failed |\n" + 7 * "|---" + "|")
    for name, command, model, requests in servers:
        with running(command, folder) as url:
            load, seconds = asyncio.run(clients(url, model, requests, options.clients, options.seconds))
        if not load.first:
            raise RuntimeError(f"{name} gave no answer:\n{(folder / 'server.log').read_text()[-2000:]}")
        p95 = statistics.quantiles(load.first, n=20)[-1]
        print(
            f"| {name} | {load.tokens / seconds:.0f} | {statistics.median(load.first):.2f} s | {p95:.2f} s "
            f"| {load.answers} | {load.wrong} | {load.failed} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
