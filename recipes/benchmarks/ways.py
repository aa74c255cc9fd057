"""The cost of each way to give a language model a memory: a step of decoding, and bytes, by number of slots.

    python -m recipes.benchmarks ways [--dtype float32 bfloat16] [--quick]

A host of random weights in the shape of GPT-2 small. Adapters have the settings that they have by default: gated
cross-attention and joined slots act in every fourth layer, all others in every layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

import mmattn
from recipes.benchmarks.decoding import WIDTH, decoder
from recipes.benchmarks.hosts import make_host, open_gates
from recipes.benchmarks.timing import Rows, Tables, interleaved, name_of, ratio

SLOTS, QUICK_SLOTS = (64, 1024, 4096), (16,)
PROMPT = 16

#: Each way by name: the settings of its adapter.
ADAPTERS: dict[str, Callable[[int], Any]] = {
    "gated": lambda _: mmattn.GatedAdapter(WIDTH),
    "inserted": lambda _: mmattn.adapters.InsertedAdapter(WIDTH),
    "inserted, without gates": lambda _: mmattn.adapters.InsertedAdapter(WIDTH, gate=False),
    "joined": lambda _: mmattn.adapters.JoinedAdapter(WIDTH),
    "prefix": lambda slots: mmattn.adapters.PrefixAdapter(slots),
    "passages": lambda _: mmattn.adapters.PassageAdapter(),
}


@torch.no_grad()
def measure(slots: int, dtype: torch.dtype, seconds: float = 20.0) -> dict[str, dict[str, float]]:
    """Return for each way the time of a step for each unit of the host alone, and MB of keys and values."""
    torch.manual_seed(0)
    host = make_host(dtype, positions=slots + PROMPT + 2)
    memory = mmattn.Memory(torch.randn(1, slots, WIDTH, dtype=dtype))
    step = decoder(host, rows=1, prompt=PROMPT)
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
        run = decoder(twin, rows=1, prompt=PROMPT)
        steps[name] = lambda run=run, model=model, prepared=prepared: run(model, memory=prepared)  # type: ignore[misc]
        steps[name]()
        sizes[name] = prepared.nbytes() / 1e6
    prompt = decoder(host, rows=1, prompt=slots + PROMPT)
    steps["in the prompt"] = lambda: prompt(host)
    config: Any = host.config
    sizes["in the prompt"] = 2 * config.n_layer * config.n_embd * slots * dtype.itemsize / 1e6
    times = interleaved(steps, seconds=seconds)
    return {
        name: {f"{slots:,} slots": ratio(times, name, "host alone"), f"{slots:,} slots, MB": sizes[name]}
        for name in times
    }


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield the ways to give a memory, for each unit of the host alone."""
    rows: Rows = {}
    for dtype in dtypes:
        for slots in QUICK_SLOTS if quick else SLOTS:
            for name, row in measure(slots, dtype, 1.0 if quick else 20.0).items():
                rows.setdefault(f"{name}, {name_of(dtype)}", {}).update(row)
    yield "Ways to give a memory: a token for each unit of the host alone, and MB of keys and values", "way", rows
