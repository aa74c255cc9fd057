"""Generating text with a memory: time per token against the same host alone.

    python -m recipes.benchmarks decoding [--dtype float32 bfloat16]

A GPT-2-small-shaped host with three gated adapters, feed-forward included. Beside our figures stands the host with keys
and values of the memory projected again at every step, as open_flamingo does it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import mmattn
from recipes.benchmarks.hosts import from_cache, make_host, open_gates
from recipes.benchmarks.timing import Tables, interleaved, name_of, plural, ratios

WIDTH = 768


def decoder(host: torch.nn.Module, rows: int, prompt: int = 16) -> Callable[..., None]:
    """Return a step of decoding after a prompt that the same call has read; every step is the same."""
    from transformers import DynamicCache

    ids = torch.ones(rows, prompt, dtype=torch.long)
    caches: dict[tuple[int, ...], DynamicCache] = {}

    def step(call: Callable[..., object], **options: object) -> None:
        key = id(call), *map(id, options.values())
        if key not in caches:
            caches[key] = DynamicCache(config=host.config)
            call(input_ids=ids, **from_cache(host, caches[key]), use_cache=True, **options)
        call(input_ids=ids[:, :1], **from_cache(host, caches[key]), use_cache=True, **options)
        caches[key].crop(-1)

    return step


@torch.no_grad()
def measure(slots: int, rows: int, dtype: torch.dtype, seconds: float = 6.0) -> dict[str, float]:
    """Return the time of a step for each unit of the host alone."""
    torch.manual_seed(0)
    model = mmattn.attach(make_host(dtype), mmattn.GatedAdapter(memory_dim=WIDTH, every=4))
    open_gates(model, dtype)
    memory = mmattn.Memory(torch.randn(rows, slots, WIDTH, dtype=dtype))
    prepared = model.prepare(memory)
    step = decoder(model.host, rows)
    times = interleaved(
        {
            "host alone": lambda: step(model),
            "cached": lambda: step(model, memory=prepared),
            "projected at every step": lambda: step(model, memory=memory),
        },
        seconds=seconds,
    )
    return ratios(times, "host alone")


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield the time per token for each unit of the host alone."""
    for dtype in dtypes:
        rows = {
            f"{slots} slots, {plural(count, 'row')}": measure(slots, count, dtype, 1.0 if quick else 5.0)
            for count in ((1,) if quick else (1, 8))
            for slots in ((64, 257) if quick else (64, 257, 1024, 4096))
        }
        title = "time per token for each unit of the host alone (GPT-2 small, three gated adapters)"
        yield f"Decoding, {name_of(dtype)}: {title}", "memory", rows
