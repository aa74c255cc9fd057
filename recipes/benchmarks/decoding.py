"""Generating text with a memory: the time of a token against the same host alone.

    python -m recipes.benchmarks decoding ways [--dtype float32 bfloat16] [--quick]

A host of random weights in the shape of GPT-2 small. `decoding`: three gated adapters, feed-forward included, and
beside our figures the host with keys and values of the memory projected again at every step, as open_flamingo does it.
`ways`: every adapter with the settings that it has by default, gated cross-attention and joined slots in every fourth
layer and all others in every layer, with the bytes that are kept of a memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

import mmattn
from recipes.benchmarks.hosts import from_cache, make_host, open_gates
from recipes.benchmarks.timing import Rows, Tables, interleaved, name_of, plural, ratio, ratios

WIDTH, PROMPT = 768, 16
#: Each way to give a memory by name: the settings of its adapter for so many slots.
ADAPTERS: dict[str, Callable[[int], Any]] = {
    "gated": lambda _: mmattn.GatedAdapter(WIDTH),
    "inserted": lambda _: mmattn.adapters.InsertedAdapter(WIDTH),
    "inserted, without gates": lambda _: mmattn.adapters.InsertedAdapter(WIDTH, gate=False),
    "joined": lambda _: mmattn.adapters.JoinedAdapter(WIDTH),
    "prefix": lambda slots: mmattn.adapters.PrefixAdapter(slots),
    "passages": lambda _: mmattn.adapters.PassageAdapter(),
}


def decoder(host: torch.nn.Module, rows: int, prompt: int = PROMPT) -> Callable[..., None]:
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
    candidates = {
        "host alone": lambda: step(model),
        "cached": lambda: step(model, memory=prepared),
        "projected at every step": lambda: step(model, memory=memory),
    }
    return ratios(interleaved(candidates, seconds=seconds), "host alone")


@torch.no_grad()
def measure_ways(slots: int, dtype: torch.dtype, seconds: float = 20.0) -> Rows:
    """Return for each way the time of a step for each unit of the host alone, and MB of keys and values."""
    torch.manual_seed(0)
    host = make_host(dtype, positions=slots + PROMPT + 2)
    memory = mmattn.Memory(torch.randn(1, slots, WIDTH, dtype=dtype))
    step = decoder(host, rows=1)
    steps: dict[str, Callable[[], object]] = {"host alone": lambda: step(host)}
    sizes: dict[str, float] = {"host alone": 0.0}
    for name, settings in ADAPTERS.items():
        # Equal weights in memory, separate modules.
        twin = copy.deepcopy(host, {id(one): one for one in chain(host.parameters(), host.buffers())})
        model = mmattn.attach(twin, settings(slots))
        open_gates(model, dtype)
        source: Any = {"prefix": [0], "passages": None}.get(name, memory)
        if name == "passages":
            cache = mmattn.hosts.PassageCache(model)
            cache.add([torch.randint(1, 30_000, (slots,))], progress=False)
            source = cache.select([[0]])
        prepared = model.prepare(source)
        run = decoder(twin, rows=1)
        steps[name] = lambda run=run, model=model, prepared=prepared: run(model, memory=prepared)  # type: ignore[misc]
        steps[name]()
        sizes[name] = prepared.nbytes() / 1e6
    prompt = decoder(host, rows=1, prompt=slots + PROMPT)
    steps["in the prompt"] = lambda: prompt(host)
    sizes["in the prompt"] = 2 * host.config.n_layer * host.config.n_embd * slots * dtype.itemsize / 1e6
    times = interleaved(steps, seconds=seconds)
    return {
        name: {f"{slots:,} slots": ratio(times, name, "host alone"), f"{slots:,} slots, MB": sizes[name]}
        for name in times
    }


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


def way_tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield the ways to give a memory, for each unit of the host alone."""
    rows: Rows = {}
    for dtype in dtypes:
        for slots in (16,) if quick else (64, 1024, 4096):
            for name, row in measure_ways(slots, dtype, 1.0 if quick else 20.0).items():
                rows.setdefault(f"{name}, {name_of(dtype)}", {}).update(row)
    yield "Ways to give a memory: a token for each unit of the host alone, and MB of keys and values", "way", rows
