"""A memory that all rows share beside one of each row, against a copy of the shared one for each row.

    python -m recipes.benchmarks shared [--quick]

Sixteen rows, 4,096 shared slots and 64 of each row, keys and values prepared: one cross-attention of width 768 for the
next token of each row, and the next token of a GPT-2-small-shaped host with three gated adapters.
"""

from __future__ import annotations

from typing import Any

import torch

import mmattn
from recipes.benchmarks.bank import WIDTH, make_reader
from recipes.benchmarks.timing import Tables, interleaved, name_of, ratio

ROWS, SHARED, SEPARATE = 16, 4096, 64


@torch.no_grad()
def measure(dtype: torch.dtype, seconds: float = 20.0, rows: int = ROWS, shared: int = SHARED) -> dict[str, float]:
    """Return times and bytes for each unit of a copy for each row, and the difference of the logits."""
    generator = torch.Generator().manual_seed(0)
    handbook = torch.randn(1, shared, WIDTH, generator=generator).to(dtype)
    pages = torch.randn(rows, SEPARATE, WIDTH, generator=generator).to(dtype)
    ids = torch.randint(5, 50_000, (rows, 1), generator=generator)
    model = make_reader(dtype).eval()
    memories = {
        "parts": model.prepare(mmattn.SharedMemory(handbook, pages)),
        "copies": model.prepare(mmattn.Memory(torch.cat([handbook.expand(rows, -1, -1), pages], 1))),
    }
    logits = {name: model(ids, memory=memory).logits for name, memory in memories.items()}
    times = interleaved(
        {name: lambda memory=memory: model(ids, memory=memory) for name, memory in memories.items()},
        seconds=seconds,
    )
    host = interleaved({"host": lambda: model(ids), "parts": lambda: model(ids, memory=memories["parts"])}, seconds=5)
    adapter = next(iter(model.adapters.values()))
    attention = adapter.attention(adapter.layers[0])
    x = torch.randn(rows, 1, model.config.n_embd, generator=generator).to(dtype)
    keys = {name: _layer(model, memory, rows) for name, memory in memories.items()}
    q = torch.randn(rows, attention.num_heads, 1, attention.head_dim, generator=generator).to(dtype)
    layer, alone = (
        interleaved({name: lambda kv=kv, run=run: run(kv) for name, kv in keys.items()}, seconds=seconds)
        for run in (lambda kv: attention(x, kv), lambda kv: attention.kv_proj.attend(q, kv))
    )
    return {
        "attention over the memory": ratio(alone, "parts", "copies"),
        "a layer": ratio(layer, "parts", "copies"),
        "a token": ratio(times, "parts", "copies"),
        "a token, of the host alone": ratio(host, "parts", "host"),
        "bytes": sum(part.nbytes() for part in memories["parts"].parts) / memories["copies"].nbytes(),
        "difference of the logits": float(
            (logits["parts"] - logits["copies"]).abs().max() / logits["copies"].abs().max()
        ),
    }


def _layer(model: mmattn.hosts.AdaptedCausalLM, memory: Any, rows: int) -> Any:
    """Return the keys and values of the first layer with an adapter."""
    caught = []
    adapter = next(iter(model.adapters.values()))
    block = adapter.block(adapter.layers[0])
    hook = block.register_forward_pre_hook(lambda module, args: caught.append(args[1]))
    model(torch.ones(rows, 1, dtype=torch.long), memory=memory)
    hook.remove()
    return caught[0]


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield a shared memory for each unit of a copy of it for each row."""
    options: dict[str, Any] = {"seconds": 1.0, "rows": 4, "shared": 512} if quick else {}
    rows = {name_of(dtype): measure(dtype, **options) for dtype in dtypes}
    yield "Shared memory: for each unit of a copy of it for each row", "dtype", rows
