"""Time and memory of mmattn on a GPU at real sizes, beside diffusers, a LoRA and the bare host.

    python -m recipes.benchmarks.on_a_card [--tiny] [--write docs/benchmarks.md]

bfloat16, random weights, a Llama of 1.2 billion, a UNet as that of Stable Diffusion 1.5. Every figure is a ratio of
times measured in turn, the median over rounds. `--write` replaces the section "On a GPU" of a page. `--tiny` measures
small hosts, also on the CPU: to see that it runs.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import mmattn
from recipes.benchmarks import core, denoising, first_token, training_memory
from recipes.benchmarks.__main__ import table
from recipes.benchmarks.core import Size
from recipes.benchmarks.hosts import from_cache, make_host, open_gates
from recipes.benchmarks.timing import Rows, interleaved, plural, ratios
from recipes.benchmarks.training_memory import Setting

DTYPE, HEADING = torch.bfloat16, "## On a GPU"
ATTENTION = [Size(8, 2048, 1601, 2048, 1280, 16), Size(8, 2048, 1601, 2048, 1280, 16, 0.6)]
ATTENTION += [
    Size(1, 512, 1601, 4096, 4096, 32),
    Size(16, 1, 4096, 2048, 1280, 16),
    Size(64, 256, 577, 1024, 1024, 16, 0.5),
]


def attention(size: Size, rounds: dict[str, float]) -> dict[str, float]:
    """Return the time of `CrossAttention` for each unit of bare operations with the same mask."""
    only = ("mmattn", "bare operations")
    forward, backward = (core.measure(size, DTYPE, backward, only, **rounds) for backward in (False, True))
    return {"forward": forward["bare operations"], "with backward": backward["bare operations"]}


@torch.no_grad()
def decoding(host: Any, count: int, way: str, rounds: dict[str, float], new: int = 64) -> dict[str, float]:
    """Return the time of prefill, of `generate`, or of a token as a CUDA graph, for each unit of the bare host."""
    bare, model = copy.deepcopy(host), mmattn.attach(host, mmattn.GatedAdapter(1280, every=4))
    open_gates(model, DTYPE)
    ids, memory = torch.randint(5, host.config.vocab_size, (count, 128)), torch.randn(count, 1601, 1280, dtype=DTYPE)
    prepared = model.prepare(mmattn.Memory(memory))

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
    row = ratios(interleaved(candidates, **rounds), "bare host")
    model.unload()
    return row


def parts(tiny: bool) -> Iterator[tuple[str, Callable[[], Rows]]]:
    """Yield titles, and functions that measure."""
    rounds: dict[str, float] = {"seconds": 0, "least": 2} if tiny else {"seconds": 4}
    shape, many = ("small", 3) if tiny else ("Llama 1B", 16)
    host = make_host(DTYPE, 16_384, shape)
    yield (
        "First token after passages, for each unit of reading them in the prompt",
        lambda: {
            f"{count} × {length} tokens": first_token.measure_passages(host, count, length, **rounds)
            for count, length in ([(2, 16)] if tiny else [(16, 256), (16, 512)])
        },
    )
    yield (
        "`CrossAttention` for each unit of bare operations with the same mask",
        lambda: {
            str(size): attention(size, rounds) for size in ([Size(2, 31, 37, 64, 48, 4, 0.5)] if tiny else ATTENTION)
        },
    )
    ways = [(way, count) for way in ("prefill", "generate") for count in (1, many)]
    yield (
        "Adapters at every fourth layer, 1,601 slots, for each unit of the bare host",
        lambda: {
            f"{way}, {plural(count, 'row')}": decoding(host, count, way, rounds, 5 if tiny else 64)
            for way, count in [*ways, *[("graph", 1)] * torch.cuda.is_available()]
        },
    )
    sizes: dict[str, int] = {"rows": 2, "tokens": 16} if tiny else {"rows": 8, "tokens": 512}
    setting = Setting(shape, (3, 5) if tiny else (8, 10, 12, 14), (7, 64) if tiny else (729, 1152), **sizes)
    yield (
        "A training step, adapters in the upper half, for each unit of a LoRA of equal size",
        lambda: training_memory.measure(setting, *((0, 2) if tiny else (4, 5))),
    )
    channels, side, steps = (320, 640, 1280, 1280), 64, [(2, 4, False), (16, 4, False), (2, 2, True)]
    if tiny:
        channels, side, steps = (32, 64), 16, [(2, 2, False)]
    yield (
        "A step of a UNet with an IP-Adapter, for each unit of the UNet alone",
        lambda: {
            f"{blocks} blocks, {plural(count, 'row')}{', compiled' * compiled}": denoising.measure_adapter(
                denoising.make_unet(DTYPE, side, channels[:blocks], 2), 1, count, compiled=compiled, **rounds
            )
            for count, blocks, compiled in steps
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
