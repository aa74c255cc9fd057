"""A step of training on packed rows, against the same documents padded.

    python -m recipes.benchmarks packing [--quick]

A GPT-2-small-shaped host with three gated adapters, eight documents of at most 64 tokens, each with 64 slots of memory.
The share of the padded batch that is text is the fill; packed, a row is as long as the longest document.
"""

from __future__ import annotations

import torch

import mmattn
from mmattn import training
from recipes.benchmarks.hosts import WIDTH, make_reader
from recipes.benchmarks.timing import Tables, interleaved, ratio

DOCUMENTS, LONGEST, SLOTS = 8, 64, 64
FILLS, QUICK_FILLS = (0.2, 0.35, 0.5, 0.8), (0.35,)


def documents(fill: float, count: int = DOCUMENTS, longest: int = LONGEST) -> list[list[int]]:
    """Return ids of documents of random lengths that fill this share of a padded batch."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(count - 1, generator=generator)
    total = fill * count - 1  # of the others together, in units of the longest
    # A power of the uniform draws has this total.
    power = next(one / 100 for one in range(1, 2000) if float((shares ** (one / 100)).sum()) <= total)
    lengths = [longest, *(max(4, round(longest * float(share))) for share in shares**power)]
    return [torch.randint(5, 50_000, (length,), generator=generator).tolist() for length in lengths]


def measure(fill: float, seconds: float = 60.0, longest: int = LONGEST) -> dict[str, float]:
    """Return the time of forward and backward for each unit of the padded batch, and the share of text in both."""
    rows = documents(fill, longest=longest)
    memory = mmattn.Memory(torch.randn(len(rows), SLOTS, WIDTH, generator=torch.Generator().manual_seed(1)))
    batches = {"padded": training.collate(rows, memory), "packed": training.pack(rows, memory)}
    model = make_reader(torch.float32).train()
    losses = {}

    def step(name: str) -> None:
        loss = training.mean_nats(model, batches[name])
        loss.backward()
        model.zero_grad()
        losses[name] = float(loss.detach())

    times = interleaved({name: lambda name=name: step(name) for name in batches}, seconds=seconds)
    text = sum(map(len, rows))
    return {
        "packed": ratio(times, "packed", "padded"),
        "fill, padded": text / batches["padded"].input_ids.numel(),
        "fill, packed": text / batches["packed"].input_ids.numel(),
        "loss, relative difference": abs(losses["packed"] / losses["padded"] - 1),
    }


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield packed rows for each unit of padded ones."""
    rows = {
        f"{fill:.0%} of the padded batch is text": measure(fill, *((2.0, 32) if quick else ()))
        for fill in (QUICK_FILLS if quick else FILLS)
    }
    yield "Packing: time of a training step for each unit of padded rows", "documents", rows
