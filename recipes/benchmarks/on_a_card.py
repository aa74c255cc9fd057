"""What mmattn costs on a GPU at the sizes that people use, beside what they would use instead.

    python -m recipes.benchmarks.on_a_card [--tiny] [--write docs/benchmarks.md]

bfloat16, random weights, a Llama of 1.2 billion, a UNet as that of Stable Diffusion 1.5. Every figure is a ratio of
times measured in turn, the median over rounds. `--write` replaces the section "On a GPU" of a page. `--tiny` measures
small hosts, also on the CPU: to see that it runs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import mmattn
from mmattn import training
from recipes.benchmarks.__main__ import table
from recipes.benchmarks.denoising import with_ip_adapter
from recipes.benchmarks.hosts import from_cache, open_gates
from recipes.benchmarks.timing import Rows, interleaved, plural, ratios, synchronize
from recipes.benchmarks.training_memory import make_host

DTYPE, HEADING = torch.bfloat16, "## On a GPU"
Row = dict[str, float]
#: Rows × queries × slots, widths of queries and memory, heads, share of real slots.
ATTENTION = [(8, 2048, 1601, 2048, 1280, 16, 1.0), (8, 2048, 1601, 2048, 1280, 16, 0.6)]
ATTENTION += [(1, 512, 1601, 4096, 4096, 32, 1.0), (16, 1, 4096, 2048, 1280, 16, 1.0)]
ATTENTION += [(64, 256, 577, 1024, 1024, 16, 0.5)]


def compared(candidates: dict[str, Callable[[], object]], tiny: bool) -> Row:
    """Return the time of each for each unit of the first."""
    times = interleaved(candidates, seconds=0 if tiny else 4, least=2 if tiny else 5)
    return ratios(times, next(iter(candidates)))


@torch.no_grad()
def first_token(host: Any, count: int, length: int, tiny: bool) -> Row:
    """Return the time to the first token after passages that the host has read before, or not."""
    model = mmattn.attach(host, mmattn.adapters.PassageAdapter())
    cache = mmattn.hosts.PassageCache(model)
    texts = torch.randint(5, host.config.vocab_size, (count, length), device="cpu")
    cache.add(list(texts), progress=False)
    question, chosen = torch.randint(5, host.config.vocab_size, (1, 32)), [list(range(count))]
    prompt, kept = torch.cat([texts.reshape(1, -1).to(question.device), question], 1), cache.select(chosen)

    def first(ids: Tensor, **kwargs: Any) -> object:
        return model(ids, use_cache=True, logits_to_keep=1, **kwargs)

    candidates = {"prompt": lambda: first(prompt), "selected": lambda: first(question, memory=cache.select(chosen))}
    candidates |= {"the same again": lambda: first(question, memory=kept)}
    row = compared(candidates | {"the question alone": lambda: first(question)}, tiny)
    model.unload()
    return row


def attention(b: int, l: int, m: int, d: int, e: int, h: int, fill: float, tiny: bool) -> Row:
    """Return the time of `CrossAttention` for each unit of bare operations with the same mask."""
    layer = mmattn.CrossAttention(d, e, h).to(dtype=DTYPE)
    x, memory = torch.randn(b, l, d, dtype=DTYPE), torch.randn(b, m, e, dtype=DTYPE)
    mask = None if fill == 1 else torch.arange(m) < (torch.rand(b, 1) * 0.5 + 0.75) * fill * m
    to_q, to_k, to_v, to_out = (nn.Linear(i, d, bias=False, dtype=DTYPE) for i in (d, e, e, d))

    def bare() -> Tensor:
        q, k, v = (part.unflatten(-1, (h, -1)).transpose(1, 2) for part in (to_q(x), to_k(memory), to_v(memory)))
        real = None if mask is None else mask[:, None, None]
        return to_out(F.scaled_dot_product_attention(q, k, v, real).transpose(1, 2).flatten(2))

    candidates: dict[str, Callable[[], Tensor]] = {"bare": bare, "forward": lambda: layer(x, memory, mask=mask)}
    with torch.no_grad():
        row = compared(dict(candidates), tiny)
    learned = {name: lambda one=one: one().float().sum().backward() for name, one in candidates.items()}
    return {"forward": row["forward"], "with backward": compared(learned, tiny)["forward"]}


@torch.no_grad()
def decoding(host: Any, count: int, way: str, tiny: bool) -> Row:
    """Return the time of prefill, of `generate`, or of a token as a CUDA graph, for each unit of the bare host."""
    bare, model = copy.deepcopy(host), mmattn.attach(host, mmattn.GatedAdapter(1280, every=4))
    open_gates(model, DTYPE)
    ids, memory = torch.randint(5, host.config.vocab_size, (count, 128)), torch.randn(count, 1601, 1280, dtype=DTYPE)
    prepared, new = model.prepare(mmattn.Memory(memory)), 5 if tiny else 64

    def candidate(module: Any, **kwargs: Any) -> Callable[[], object]:
        if way == "prefill":
            return lambda: module(ids, **kwargs)
        if way == "generate":
            length = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            return lambda: module.generate(ids, **length, **kwargs)
        compiled, place = torch.compile(module, mode="reduce-overhead"), torch.full((count, 1), 8)
        cache = from_cache(bare, transformers.StaticCache(config=bare.config, max_cache_len=256))
        step = lambda: compiled(ids[:, :1], position_ids=place, use_cache=True, **cache, **kwargs)  # noqa: E731
        for _ in range(3):  # compiled, then recorded
            step()
        return step

    candidates = {"bare host": candidate(bare), "prepared": candidate(model, memory=prepared)}
    if way != "graph":
        candidates |= {"memory": candidate(model, memory=memory), "no memory": candidate(model)}
    row = compared(candidates, tiny)
    model.unload()
    return row


def training_step(host: Any, tiny: bool) -> Rows:
    """Return time and memory of a step, for each unit of a LoRA with as many parameters."""
    count, length, slots, width = (2, 16, 7, 64) if tiny else (8, 512, 729, 1152)
    ids, memory = torch.randint(5, host.config.vocab_size, (count, length)), torch.randn(count, slots, width)
    shared, depth = {id(one): one for one in host.parameters()}, host.config.num_hidden_layers
    layers, steps = list(range(depth // 2, depth, max(1, depth // 8))), {}
    for name, chunk_size in {"LoRA": None, "adapters": None, "adapters, loss in chunks": "auto"}.items():
        model: Any = mmattn.attach(
            copy.deepcopy(host, dict(shared)), mmattn.GatedAdapter(width, layers=layers, num_heads=8, head_dim=64)
        )
        if name == "LoRA":
            trained, _ = model.trainable_parameters()
            model = training.matched_lora(model.unload(), trained)
        parameters = [one for one in model.train().parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        batch = training.TextBatch(ids, None, ids, None if name == "LoRA" else mmattn.Memory(memory))

        def step(model: Any = model, batch: Any = batch, optimizer: Any = optimizer, chunk: Any = chunk_size) -> None:
            training.sum_nats(model, batch, chunk)[0].backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    times, peaks = compared(steps, tiny), {name: peak(step) for name, step in steps.items()}
    return {name: {"time": times[name], "memory": peaks[name] / peaks["LoRA"]} for name in steps}


def peak(step: Callable[[], object]) -> float:
    """Return the bytes that a call takes at most above what is there; 1 without a card."""
    if not torch.cuda.is_available():
        return 1.0
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


@torch.no_grad()
def denoising(count: int, blocks: int, compiled: bool, tiny: bool) -> Row:
    """Return the time of a UNet's step with an IP-Adapter, here and in diffusers, for each unit of the UNet alone."""
    from diffusers import UNet2DConditionModel

    side, crossing = (16 if tiny else 64), blocks - 1
    sizes: dict[str, Any] = {"sample_size": side, "cross_attention_dim": 768, "attention_head_dim": 8}
    sizes["block_out_channels"] = (32, 64) if tiny else (320, 640, 1280, 1280)[:blocks]
    sizes["down_block_types"] = (*["CrossAttnDownBlock2D"] * crossing, "DownBlock2D")
    sizes["up_block_types"] = ("UpBlock2D", *["CrossAttnUpBlock2D"] * crossing)
    plain = UNet2DConditionModel(**sizes).to(dtype=DTYPE).eval()
    theirs, model = with_ip_adapter(plain)
    x, text = torch.randn(count, 4, side, side, dtype=DTYPE), torch.randn(count, 77, 768, dtype=DTYPE)
    image, time = torch.randn(count, 1, 768, dtype=DTYPE), torch.tensor(10)
    alone, other, ours = (torch.compile(one) if compiled else one for one in (plain, theirs, model.host))
    with model.condition(mmattn.Memory(image)):
        candidates = {"UNet alone": lambda: alone(x, time, text), "mmattn": lambda: ours(x, time, text)}
        added = {"image_embeds": [image]}
        return compared(candidates | {"diffusers": lambda: other(x, time, text, added_cond_kwargs=added)}, tiny)


def parts(tiny: bool) -> Iterator[tuple[str, Callable[[], Rows]]]:
    """Yield titles, and functions that measure."""
    host = make_host("small" if tiny else "Llama 1B")
    on_card, many = torch.cuda.is_available(), 3 if tiny else 16
    lengths = [(2, 16)] if tiny else [(16, 256), (16, 512)]
    yield (
        "First token after passages, for each unit of reading them in the prompt",
        lambda: {f"{count} × {length} tokens": first_token(host, count, length, tiny) for count, length in lengths},
    )
    yield (
        "`CrossAttention`, rows × queries × slots, for each unit of bare operations with the same mask",
        lambda: {
            f"{b} × {l:,} × {m:,}, width {d}, {100 * fill:.0f} % full": attention(b, l, m, d, e, h, fill, tiny)
            for b, l, m, d, e, h, fill in ([(2, 31, 37, 64, 48, 4, 0.5)] if tiny else ATTENTION)
        },
    )
    yield (
        "Adapters at every fourth layer, 1,601 slots, for each unit of the bare host",
        lambda: {
            f"{way}, {plural(count, 'row')}": decoding(host, count, way, tiny)
            for way, count in [(way, n) for way in ("prefill", "generate") for n in (1, many)]
            + [("graph", 1)] * on_card
        },
    )
    yield (
        "A training step, adapters in the upper half, for each unit of a LoRA of equal size",
        lambda: training_step(host, tiny),
    )
    yield (
        "A step of a UNet with an IP-Adapter, for each unit of the UNet alone",
        lambda: {
            f"{blocks} blocks, {plural(count, 'row')}{', compiled' * compiled}": denoising(
                count, blocks, compiled, tiny
            )
            for count, blocks, compiled in [(2, 2, False)] + [(2, 4, False), (16, 4, False), (2, 2, True)] * (not tiny)
        },
    )


def written(page: str, section: str) -> str:
    """Return a page with another section under `HEADING`."""
    before, rest = page.split(f"{HEADING}\n", 1)
    return f"{before}{HEADING}\n\n{section}\n\n## {rest.split(chr(10) + '## ', 1)[1]}"


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.on_a_card", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small hosts, few rounds: to see that it runs")
    parser.add_argument("--write", type=Path, help="page whose section is replaced by what is measured")
    options = parser.parse_args(arguments)
    on_card = torch.cuda.is_available()
    if not options.tiny and not on_card:
        parser.error("there is no CUDA device; --tiny runs without")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    section = [
        f"{torch.cuda.get_device_name() if on_card else 'No card'}, {versions}, bfloat16 (`make gpu`). Every figure is "
        "a ratio of times, the median over rounds; below 1, mmattn is faster."
    ]
    if on_card:
        torch.set_default_device("cuda")
    torch.manual_seed(0)
    for title, measure in parts(options.tiny):
        section.append(f"{title}:\n\n{table('work', measure())}")
        print(section[-1] + "\n", flush=True)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(written(page, "\n\n".join(section)), encoding="utf-8")


if __name__ == "__main__":
    main()
