"""Generating text with a memory: time per token against the same host alone.

    python -m recipes.benchmarks decoding compiled [--dtype float32 bfloat16]

A GPT-2-small-shaped host with three gated adapters, feed-forward included. Beside our figures stands the host with keys
and values of the memory projected again at every step, as open_flamingo does it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import mmattn
from recipes.benchmarks.hosts import from_cache, make_host, open_gates
from recipes.benchmarks.timing import Tables, interleaved, name_of, plural, ratio, ratios

WIDTH = 768


def decoder(host: torch.nn.Module, rows: int, prompt: int = 16) -> Callable[..., None]:
    """Return a step of decoding after a prompt; the cache is cropped, so that every step is the same."""
    from transformers import DynamicCache

    cache = DynamicCache(config=host.config)
    ids = torch.ones(rows, prompt, dtype=torch.long)
    host(input_ids=ids, **from_cache(host, cache), use_cache=True)

    def step(call: Callable[..., object], **options: object) -> None:
        call(input_ids=ids[:, :1], **from_cache(host, cache), use_cache=True, **options)
        cache.crop(-1)

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


@torch.no_grad()
def measure_compiled(slots: int, dtype: torch.dtype, seconds: float = 15.0) -> dict[str, float]:
    """Return the time of a step of a compiled Llama with a static cache, for each unit of the eager step."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 4096, "max_position_embeddings": 1024}
    host = LlamaForCausalLM(LlamaConfig(hidden_size=WIDTH, intermediate_size=4 * WIDTH, **sizes)).to(dtype).eval()
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=WIDTH, every=4))
    open_gates(model, dtype)
    ids, calls = torch.ones(1, 16, dtype=torch.long), {"eager": host, "compiled": torch.compile(host, fullgraph=True)}
    with model.condition(mmattn.Memory(torch.randn(1, slots, WIDTH, dtype=dtype))):
        steps: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            cache = StaticCache(config=host.config, max_cache_len=1024)
            host(input_ids=ids, **from_cache(host, cache), use_cache=True)
            places = iter(range(16, 1024))

            def step(call: Callable[..., object] = call, cache: object = cache, places: object = places) -> None:
                place = torch.tensor([[next(places)]])  # type: ignore[call-overload]
                call(input_ids=ids[:, :1], **from_cache(host, cache), use_cache=True, position_ids=place)

            for _ in range(3):
                step()
            steps[name] = step
        times = interleaved(steps, seconds=seconds)
    return {"compiled": ratio(times, "compiled", "eager")}


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


def compiled_tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield the time of a compiled step for each unit of the eager one."""
    rows = {
        f"{name_of(dtype)}, {slots} slots": measure_compiled(slots, dtype, 1.0 if quick else 15.0)
        for dtype in dtypes
        for slots in ((257,) if quick else (257, 1601, 4096))
    }
    yield "Compiled: time of a step for each unit of the step as it is", "memory", rows
