"""Passages as a memory, against the same passages in the prompt: time to the first token of the answer.

    python -m recipes.benchmarks prompting [--dtype float32 bfloat16] [--quick]

A GPT-2-small-shaped host, passages of 64 tokens and a question of 32. "memory, prepared" attends with three gated
adapters to keys and values that were cached before the request, "memory, projected" to the passages' hidden states of
width 384. "prompt, cached" is the host with its own key/value cache of the passages, as a server keeps it for prompts
that begin alike: it holds only while the same passages stand there in the same order.
"""

from __future__ import annotations

import torch

from recipes.benchmarks.hosts import PASSAGE, PROMPT, WIDTH, from_cache, make_host, make_reader
from recipes.benchmarks.timing import Tables, interleaved, name_of, ratios

PASSAGES, QUICK_PASSAGES = (4, 16, 64), (4, 16)


@torch.no_grad()
def measure(passages: int, dtype: torch.dtype, seconds: float = 20.0) -> dict[str, float]:
    """Return the time to the first token for each unit of the prompt's, and MB of keys and values."""
    from transformers import DynamicCache

    length = passages * PASSAGE
    host, model = make_host(dtype, length + PROMPT + 1), make_reader(dtype, length + PROMPT + 1)
    question = torch.randint(1, 50_000, (1, PROMPT))
    prompt = torch.cat([torch.randint(1, 50_000, (1, length)), question], dim=1)
    memory = torch.randn(1, length, WIDTH, dtype=dtype)
    prepared = model.prepare(memory)
    cache = DynamicCache(config=host.config)
    host(prompt[:, :length], **from_cache(host, cache), logits_to_keep=1)

    def continued() -> None:
        host(question, **from_cache(host, cache), logits_to_keep=1)
        cache.crop(-PROMPT)

    times = interleaved(
        {
            "prompt": lambda: host(prompt, use_cache=True, logits_to_keep=1),
            "prompt, cached": continued,
            "memory, projected": lambda: model(question, memory=memory, use_cache=True, logits_to_keep=1),
            "memory, prepared": lambda: model(question, memory=prepared, use_cache=True, logits_to_keep=1),
        },
        seconds=seconds,
    )
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    return ratios(times, "prompt") | {"MB of the prompt": held / 1e6, "MB of the memory": prepared.nbytes() / 1e6}


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield passages as a memory, for each unit of the same passages in the prompt."""
    for dtype in dtypes:
        rows = {
            f"{passages} passages": measure(passages, dtype, 1.0 if quick else 20.0)
            for passages in (QUICK_PASSAGES if quick else PASSAGES)
        }
        title = "time to the first token for each unit of reading the passages in the prompt"
        yield f"Prompting, {name_of(dtype)}: {title}", "passages of 64 tokens", rows
