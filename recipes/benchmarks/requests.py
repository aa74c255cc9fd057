"""Mixed requests with memories: continuous batching, against one request after the other and static batches of eight.

    python -m recipes.benchmarks requests [--quick]

200 requests to a GPT-2-small-shaped host with three gated adapters: 0 to 1,024 slots of memory, a third of them share
one; prompts of 4 to 200 tokens; 8 to 64 new ones, greedily. A static batch pads prompts on the left and memories on the
right, and writes until its longest answer is done.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

import mmattn
from recipes.benchmarks.hosts import WIDTH, make_reader
from recipes.benchmarks.timing import Rows, Tables, name_of, without_default_device

COUNT, STATIC = 200, 8
GREEDY = {"do_sample": False, "pad_token_id": 0}


@dataclass
class Request:
    """A prompt, its memory, and the number of new tokens."""

    ids: list[int]
    memory: mmattn.Memory | None
    new: int


def draw(count: int, slots: int = 1024, prompt: int = 200, new: int = 64) -> list[Request]:
    """Return requests of all sizes; a third share one memory."""
    random_numbers, generator = random.Random(0), torch.Generator(torch.get_default_device()).manual_seed(0)
    shared = mmattn.Memory(torch.randn(1, slots // 2, WIDTH, generator=generator))
    requests = []
    for number in range(count):
        ids = [random_numbers.randrange(5, 50_000) for _ in range(random_numbers.randint(4, prompt))]
        length = random_numbers.randint(0, slots)
        memory = mmattn.Memory(torch.randn(1, length, WIDTH, generator=generator)) if length else None
        requests.append(Request(ids, shared if number % 3 == 0 else memory, random_numbers.randint(new // 8, new)))
    return requests


def one_by_one(model: Any, requests: list[Request]) -> list[list[int]]:
    """Call `generate` for each request."""
    answers = []
    for one in requests:
        out = model.generate(
            torch.tensor([one.ids], device=model.host.device), memory=one.memory, max_new_tokens=one.new, **GREEDY
        )
        answers.append(out[0, len(one.ids) :].tolist())
    return answers


def static(model: Any, requests: list[Request]) -> list[list[int]]:
    """Call `generate` for eight requests at a time, in order."""
    answers = []
    for begin in range(0, len(requests), STATIC):
        some = requests[begin : begin + STATIC]
        longest = max(len(one.ids) for one in some)
        ids = torch.tensor([[0] * (longest - len(one.ids)) + one.ids for one in some], device=model.host.device)
        keep = torch.tensor(
            [[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in some], device=model.host.device
        )
        rows = [
            torch.zeros(0, WIDTH, device=model.host.device) if one.memory is None else one.memory.tokens[0]
            for one in some
        ]
        memory = mmattn.Memory.pad(rows)
        out = model.generate(
            ids, attention_mask=keep, memory=memory, max_new_tokens=max(one.new for one in some), **GREEDY
        )
        answers += [row[longest : longest + one.new].tolist() for row, one in zip(out, some, strict=True)]
    return answers


def continuous(model: Any, requests: list[Request]) -> list[list[int]]:
    """Run requests through transformers' scheduler; on the CPU some thirty at once are the quickest."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks, tokens = (128, 256) if model.host.device.type == "cpu" else (2048, 2048)
    settings = {
        "generation_config": GenerationConfig(eos_token_id=-1, **GREEDY),
        "continuous_batching_config": ContinuousBatchingConfig(
            num_blocks=blocks, page_size=32, max_batch_tokens=tokens
        ),
    }
    answers: dict[str, list[int]] = {}
    with model.host.continuous_batching_context_manager(**settings) as manager:
        names = [manager.add_request(one.ids, memory=one.memory, max_new_tokens=one.new) for one in requests]
        while len(answers) < len(requests):
            result = manager.get_result(timeout=600)
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                answers[result.request_id] = result.generated_tokens
    return [answers[name] for name in names]


def measure(count: int = COUNT, dtype: torch.dtype = torch.float32, **sizes: int) -> Rows:
    """Return for each way tokens a second, and throughput and equal answers beside one after the other."""
    model, requests = make_reader(dtype).eval(), draw(count, **sizes)
    rows, tokens, expected, first = {}, sum(one.new for one in requests), None, 0.0
    for name, way in (("one after the other", one_by_one), ("batches of eight", static), ("continuous", continuous)):
        with without_default_device():
            way(model, requests[:3])
            begin = time.perf_counter()
            answers = way(model, requests)
            seconds = time.perf_counter() - begin
        expected, first = (answers, seconds) if expected is None else (expected, first)
        rows[name] = {
            "tokens a second": tokens / seconds,
            "throughput": first / seconds,
            "answers equal": sum(a == b for a, b in zip(answers, expected, strict=True)) / count,
        }
    return rows


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield mixed requests through continuous batching, for each unit of one after the other."""
    sizes = {"count": 6, "slots": 64, "prompt": 16, "new": 8} if quick else {}
    rows = measure(dtype=dtypes[0], **sizes)
    yield f"Requests, {name_of(dtypes[0])}: {COUNT} with memories of their own", "way", rows
