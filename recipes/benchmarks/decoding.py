"""Generating text with a memory: time per token against the same host alone.

    python -m recipes.benchmarks decoding [--dtype float32 bfloat16] [--slots 64 1024] [--rows 1 8]

A GPT-2-small-shaped host with three gated adapters, feed-forward included. Beside our figures stands the host with keys
and values of the memory projected again at every step, as open_flamingo does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import mmattn
from recipes.benchmarks.timing import interleaved, ratio

WIDTH = 768


def make_host(dtype: torch.dtype, positions: int = 1024) -> torch.nn.Module:
    """A random GPT-2 small for texts of so many tokens; its answers do not matter, its sizes do."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(n_positions=positions, bos_token_id=None, eos_token_id=None, **dropouts)
    return GPT2LMHeadModel(config).to(dtype).eval()


def going_on(host: torch.nn.Module, cache: object) -> dict[str, Any]:
    """The argument with which a host goes on from a cache: `cache` since transformers 5.24."""
    known = inspect.signature(host.forward).parameters
    return {"past_key_values" if "past_key_values" in known else "cache": cache}


def decoder(host: torch.nn.Module, rows: int, prompt: int = 16) -> Callable[..., None]:
    """A step of decoding after a prompt of 16 tokens; the cache is cut back, so that every step is the same."""
    from transformers import DynamicCache

    cache = DynamicCache(config=host.config)
    ids = torch.ones(rows, prompt, dtype=torch.long)
    host(input_ids=ids, **going_on(host, cache), use_cache=True)

    def step(call: Callable[..., object], **given: object) -> None:
        call(input_ids=ids[:, :1], **going_on(host, cache), use_cache=True, **given)
        cache.crop(-1)

    return step


def conditioned(slots: int, rows: int, dtype: torch.dtype) -> tuple[mmattn.hosts.AdaptedCausalLM, mmattn.Memory]:
    """The host with three gated adapters whose gates are open, and a memory for it."""
    torch.manual_seed(0)
    model = mmattn.attach(make_host(dtype), mmattn.GatedAdapter(memory_dim=WIDTH, every=4))
    model.adapters.to(dtype)
    for name, parameter in model.adapters.named_parameters():
        if "gate" in name:
            parameter.data.fill_(0.5)
    return model, mmattn.Memory(torch.randn(rows, slots, WIDTH, dtype=dtype))


@torch.no_grad()
def measure(slots: int, rows: int, dtype: torch.dtype, seconds: float = 6.0) -> dict[str, float]:
    """Time of a step for each unit of the host alone."""
    model, memory = conditioned(slots, rows, dtype)
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
    return {name: ratio(times, name, "host alone") for name in times}


@torch.no_grad()
def measure_beams(slots: int, beams: int, dtype: torch.dtype, seconds: float = 12.0) -> dict[str, float]:
    """Time of writing 16 tokens with beams for each unit of the host alone: shared, and a copy for each beam."""
    model, memory = conditioned(slots, 1, dtype)
    ids = torch.ones(1, 16, dtype=torch.long)
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    shared, copies = model.prepare(memory), model.prepare(memory[[0] * beams])
    rows = ids.repeat(beams, 1)
    times = interleaved(
        {
            "host alone": lambda: model.generate(ids, num_beams=beams, **settings),
            "shared": lambda: model.generate(ids, memory=shared, num_beams=beams, **settings),
            "host alone, rows": lambda: model.generate(rows, **settings),
            "copied": lambda: model.generate(rows, memory=copies, **settings),
        },
        seconds=seconds,
        least=5,
    )
    return {
        "shared": ratio(times, "shared", "host alone"),
        "a copy per beam": ratio(times, "copied", "host alone, rows"),
        "bytes shared": float(shared.nbytes()),
        "bytes copied": float(copies.nbytes()),
    }


@torch.no_grad()
def measure_compiled(slots: int, dtype: torch.dtype, seconds: float = 15.0) -> dict[str, float]:
    """Time of a step of a compiled Llama with a static cache, for each unit of the same step as it is.

    Args:
        slots: m.
        dtype: of everything.
        seconds: to measure for.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 4096, "max_position_embeddings": 1024}
    host = LlamaForCausalLM(LlamaConfig(hidden_size=WIDTH, intermediate_size=4 * WIDTH, **sizes)).to(dtype).eval()
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=WIDTH, every=4))
    model.adapters.to(dtype)
    for name, parameter in model.adapters.named_parameters():
        if "gate" in name:
            parameter.data.fill_(0.5)
    ids, calls = torch.ones(1, 16, dtype=torch.long), {"eager": host, "compiled": torch.compile(host, fullgraph=True)}
    with model.condition(mmattn.Memory(torch.randn(1, slots, WIDTH, dtype=dtype))):
        steps: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            cache = StaticCache(config=host.config, max_cache_len=1024)
            host(input_ids=ids, **going_on(host, cache), use_cache=True)
            places = iter(range(16, 1024))

            def step(call: Callable[..., object] = call, cache: object = cache, places: object = places) -> None:
                place = torch.tensor([[next(places)]])  # type: ignore[call-overload]
                call(input_ids=ids[:, :1], **going_on(host, cache), use_cache=True, position_ids=place)

            for _ in range(3):
                step()
            steps[name] = step
        times = interleaved(steps, seconds=seconds)
    return {"compiled": ratio(times, "compiled", "eager")}
