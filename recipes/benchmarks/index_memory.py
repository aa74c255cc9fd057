"""Attention that searches an index of all entries: time of a token, and how much of exact attention is found.

    python -m recipes.benchmarks index_memory [--quick]

The GPT-2-small-shaped host with three gated adapters writes tokens while each layer and head searches the index, for
each unit of the host alone. Entries lie around centres, as in `search`; the adapters' queries are made to look for
some of them: the projections of queries are fitted so that states of the host ask for entries near those drawn for
them. What is found is compared with exact attention over all entries, up to a hundred thousand of them: the share of
the exact weights that lies on the entries found, and how far the output of the attention is from the exact one.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import mmattn
from recipes.benchmarks.bank import WIDTH, make_reader
from recipes.benchmarks.decoding import from_cache
from recipes.benchmarks.search import bytes_held, make_vectors
from recipes.benchmarks.timing import Tables, interleaved, ratio

SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (2_000,)
HITS, EXACT_UP_TO, PROMPT = 64, 100_000, 32
#: How much longer queries are than the keys that they look for: attention as of a trained adapter, on few entries.
SHARPNESS = 4.0
STORES: dict[str, dict[str, Any]] = {
    "ivf": {"visited": 16},
    "hnsw": {"links": 24, "build_effort": 64, "search_effort": 160},
    "exact": {},
}


@torch.no_grad()
def make_seeking(model: Any, vectors: Tensor) -> None:
    """Fit the query projections so that the query of a state lies near a random entry."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 50_000, (8, PROMPT), generator=generator)
    states: dict[int, Tensor] = {}
    adapter = model.adapter("default")
    hooks = [
        adapter.attention(layer).register_forward_hook(
            lambda module, args, out, layer=layer: states.__setitem__(layer, args[0].flatten(0, 1))
        )
        for layer in adapter.layers
    ]
    model(ids, memory=vectors[:1, None].expand(8, 1, -1))
    for hook in hooks:
        hook.remove()
    for layer, x in states.items():
        attention = adapter.attention(layer)
        heads, width = attention.num_heads, attention.head_dim
        targets = vectors[torch.randint(len(vectors), (len(x),), generator=generator)]
        keys = attention.kv_proj.k_proj.weight.view(heads, width, -1)
        aimed = SHARPNESS * torch.einsum("ne,hke->nhk", targets * WIDTH**0.5, keys).flatten(1)
        ridge = 1e-2 * torch.eye(x.shape[1]) * x.square().mean() * len(x)
        attention.q_proj.weight.copy_(torch.linalg.solve(x.T @ x + ridge, x.T @ aimed).T)


@torch.no_grad()
def found_of_exact(model: Any, index: mmattn.Index, count: int) -> dict[str, float]:
    """Compare attention over `count` found entries with exact attention, as the mean over layers, heads and tokens."""
    ids = torch.randint(5, 50_000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    shares, errors = [], []

    def compare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        entries = mmattn.Memory(index.as_memory().entries(None).memory().tokens)
        exact, weights = module.forward(args[0], model.adapter("default").read(entries).tokens, return_weights=True)
        _, sparse = module.forward(*args, return_weights=True)
        shares.append((weights * (sparse > 0)).sum(-1).mean())
        errors.append((out - exact).norm() / exact.norm())

    adapter = model.adapter("default")
    hooks = [adapter.attention(layer).register_forward_hook(compare, with_kwargs=True) for layer in adapter.layers]
    model(ids, memory=index.as_memory(count))
    for hook in hooks:
        hook.remove()
    return {
        f"{count} found: share of the weights": float(torch.stack(shares).mean()),
        f"{count} found: difference of outputs": float(torch.stack(errors).mean()),
    }


@torch.no_grad()
def measure(count: int, store: str, seconds: float = 12.0) -> dict[str, float]:
    """Return the time of a token beside the host alone, the cost of the index, and its share of the weights."""
    model = make_reader(torch.float32).eval()
    vectors, _ = make_vectors(count, 1)
    make_seeking(model, vectors)
    begin = time.perf_counter()
    index = mmattn.Index.build(vectors, metric="ip", store=store, **STORES[store])
    memory = index.as_memory(HITS)
    ids = torch.randint(5, 50_000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    model(ids, memory=memory)
    building = time.perf_counter() - begin
    caches = {name: model.host(ids, use_cache=True).past_key_values for name in ("alone", "searching")}

    def token(name: str, memory: Any) -> None:
        model(ids[:, :1], memory=memory, **from_cache(model.host, caches[name]))
        caches[name].crop(-1)

    times = interleaved(
        {"alone": lambda: token("alone", None), "searching": lambda: token("searching", memory)}, seconds=seconds
    )
    row = {
        "a token": ratio(times, "searching", "alone"),
        "seconds of building": building,
        "bytes an entry": bytes_held(index) / count,
    }
    if count <= EXACT_UP_TO:
        for number in (16, HITS):
            row |= found_of_exact(model, index, number)
    return row


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield attention that searches an index, for each unit of the host alone."""
    rows = {
        f"{count:,} entries, {store}": measure(count, store, 1.0 if quick else 12.0)
        for count in (QUICK_SIZES if quick else SIZES)
        for store in STORES
    }
    yield "Index memory: a token whose attention searches all entries of an index", "index", rows
