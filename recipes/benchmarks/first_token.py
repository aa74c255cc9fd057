"""The first token of an answer from passages: in the prompt, in a memory, or read by the host before.

    python -m recipes.benchmarks prompting passages [--dtype float32 bfloat16] [--quick]

Passages of 64 tokens and a question of 32, on hosts of random weights. `prompting`: "memory, prepared" attends with
three gated adapters to keys and values that were cached before the request, "memory, projected" to the passages' hidden
states of width 384. "prompt, cached" is the host with its own key/value cache of the passages, as a server keeps it for
prompts that begin alike: it holds only while the same passages stand there in the same order.

`passages`: "selected" puts keys and values together for the request, as a search would; "the same again" is a later
request for the same passages; "16 tokens again" reads the first tokens of each passage again where they stand, which a
host with learned positions cannot.
"""

from __future__ import annotations

from typing import Any

import torch

import mmattn
from recipes.benchmarks.hosts import from_cache, make_host, open_gates
from recipes.benchmarks.timing import Tables, interleaved, name_of, ratios

#: Width of the hidden states of passages (as MiniLM has it), tokens of a passage, and tokens of a question.
WIDTH, PASSAGE, PROMPT = 384, 64, 32
COUNTS, PASSAGES, RECOMPUTED = (4, 16, 64), 16, 16


@torch.no_grad()
def measure_memory(passages: int, dtype: torch.dtype, seconds: float = 20.0) -> dict[str, float]:
    """Return the time with passages in a memory for each unit of the prompt's, and MB of keys and values."""
    from transformers import DynamicCache

    length = passages * PASSAGE
    torch.manual_seed(0)
    host, twin = (make_host(dtype, length + PROMPT + 1) for _ in range(2))
    model = mmattn.attach(twin, mmattn.GatedAdapter(WIDTH, every=4, num_heads=8, head_dim=64))
    open_gates(model, dtype)
    question = torch.randint(1, 50_000, (1, PROMPT))
    prompt = torch.cat([torch.randint(1, 50_000, (1, length)), question], dim=1)
    memory = torch.randn(1, length, WIDTH, dtype=dtype)
    prepared = model.prepare(memory)
    cache = DynamicCache(config=host.config)
    host(prompt[:, :length], **from_cache(host, cache), logits_to_keep=1)

    def continued() -> None:
        host(question, **from_cache(host, cache), logits_to_keep=1)
        cache.crop(-PROMPT)

    options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    candidates = {
        "prompt": lambda: host(prompt, **options),
        "prompt, cached": continued,
        "memory, projected": lambda: model(question, memory=memory, **options),
        "memory, prepared": lambda: model(question, memory=prepared, **options),
    }
    times = interleaved(candidates, seconds=seconds)
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    return ratios(times, "prompt") | {"MB of the prompt": held / 1e6, "MB of the memory": prepared.nbytes() / 1e6}


@torch.no_grad()
def measure_passages(host: Any, count: int, length: int = PASSAGE, **rounds: float) -> dict[str, float]:
    """Return the time with passages that the host has read for each unit of the prompt's, and MB of keys and values."""
    model = mmattn.attach(host, mmattn.adapters.PassageAdapter())
    words = min(host.config.vocab_size, 30_000)
    texts, question = torch.randint(5, words, (count, length), device="cpu"), torch.randint(5, words, (1, PROMPT))
    cache = mmattn.hosts.PassageCache(model)
    cache.add(list(texts), progress=False)
    rows, prompt = [list(range(count))], torch.cat([texts.reshape(1, -1).to(question.device), question], 1)
    prepared, options = cache.select(rows), {"use_cache": True, "logits_to_keep": 1}
    candidates = {
        "prompt": lambda: host(prompt, **options),
        "selected": lambda: model(question, memory=cache.select(rows), **options),
        "the same again": lambda: model(question, memory=prepared, **options),
        "the question alone": lambda: host(question, **options),
    }
    if host.config.model_type == "llama":
        candidates[f"{RECOMPUTED} tokens again"] = lambda: model(
            question, memory=cache.select(rows, recomputed_tokens=RECOMPUTED), **options
        )
    times, held = interleaved(candidates, **rounds), cache.nbytes() / 1e6
    model.unload()
    return {"MB": held} | ratios(times, "prompt")


def memory_tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield passages as a memory, for each unit of the same passages in the prompt."""
    for dtype in dtypes:
        counts, seconds = (COUNTS[:2], 1.0) if quick else (COUNTS, 20.0)
        rows = {f"{passages} passages": measure_memory(passages, dtype, seconds) for passages in counts}
        title = "time to the first token for each unit of reading the passages in the prompt"
        yield f"Prompting, {name_of(dtype)}: {title}", "passages of 64 tokens", rows


def passage_tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield passages that the host has read before, for each unit of the same passages in the prompt."""
    count, seconds = (3, 1.0) if quick else (PASSAGES, 20.0)
    rows = {}
    for shape in ("GPT-2 small", "Llama"):
        for dtype in dtypes:
            host = make_host(dtype, count * PASSAGE + PROMPT + 1, shape)
            rows[f"{shape}, {name_of(dtype)}"] = measure_passages(host, count, seconds=seconds)
    yield "Passages read before: time to the first token for each unit of reading them in the prompt", "host", rows
