"""What the tests of the bank share: entries, what three requests found, and the same memory made by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

import mmattn
from tests import tiny
from tests.hosts.causal_lm.test_settings import SETTINGS as GATED
from tests.tiny import assert_close

ROWS, LENGTH, ENTRIES, SLOTS, HITS = 3, 7, 23, 5, 11

OF_BLOCKS = ("before the layer", "length norm", "RMS norm", "no memory norm", "SwiGLU")
SETTINGS = {name: setting for name, setting in GATED.items() if name not in OF_BLOCKS}
SETTINGS |= {"null slot and length norm": {"null_slot": True, "length_norm": 17.0}}
SETTINGS |= {"plain": {}, "latest hit": {"visible_segments": "latest"}}
settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))


def entries(n=ENTRIES, m=SLOTS, seed=0):
    """Entries of 1 to m real slots; after them there is garbage."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, m + 1, (n, 1), generator=draw)
    mask = torch.arange(m) < lengths
    tokens = torch.randn(n, m, tiny.MEMORY_DIM, generator=draw).masked_fill(~mask[..., None], torch.nan)
    return mmattn.Memory(tokens, mask)


def hits(n=ENTRIES, count=HITS, seed=0):
    """Rows, mask and scores of three requests: some hits are missing, the second request found nothing at all."""
    draw = torch.Generator().manual_seed(100 + seed)
    rows = torch.randint(0, n, (ROWS, count), generator=draw)
    mask = torch.rand(ROWS, count, generator=draw) < 0.7
    mask[1], mask[:, 0] = False, torch.tensor([True, False, True])
    scores = torch.randn(ROWS, count, generator=draw)
    return {"rows": rows.masked_fill(~mask, -1), "mask": mask, "scores": scores.masked_fill(~mask, torch.nan)}


def by_hand(memory, rows, mask, scores):
    """The memory that a request without a bank would be given."""
    (b, n), m = rows.shape, memory.length
    rows = rows.clamp(min=0)
    real = memory.real_slots()[rows] & mask[..., None]
    return mmattn.Memory(
        memory.tokens[rows].flatten(1, 2),
        real.flatten(1),
        torch.arange(n).repeat_interleave(m).expand(b, -1),
        torch.where(mask, scores, 0).repeat_interleave(m, 1),
    )


def projections(model):
    """A list that grows by an entry each time that keys and values are projected inside the block."""
    return tiny.counting(*(attention.kv_proj.k_proj for attention in model.attentions().values()))


def answer(model, memory, **given):
    """Logits, and how many projections they took."""
    if any(adapter.config.visible_segments == "latest" for adapter in model.adapters.values()):
        given["images"] = torch.arange(LENGTH).clamp(max=HITS - 1).add(1).expand(ROWS, -1)
    with torch.no_grad(), projections(model) as seen:
        return model(tiny.text(ROWS, LENGTH), memory=memory, **given).logits, len(seen)


def check(bank, memory, found=None):
    """What the bank gathers is what projecting the entries of `memory` gives; returns it."""
    found = found or hits(memory.batch)
    got, projected = answer(bank.model, bank.gather(**found))
    want, _ = answer(bank.model, by_hand(memory, **found))
    assert projected == 0
    assert_close(got, want, 1e-6)
    return got


def rounded(numbers, mask, by_channel):
    """The definition of quantised keys or values (n, g, m, k): codes times scales, each entry and head by itself.

    Args:
        numbers: (n, g, m, k).
        mask: (n, m) bool.
        by_channel: numbers of a channel share a scale; else those of a slot.
    """
    out, steps = torch.zeros_like(numbers), torch.zeros_like(numbers)
    for entry, head in itertools.product(range(numbers.shape[0]), range(numbers.shape[1])):
        page = numbers[entry, head].float().masked_fill(~mask[entry][:, None], 0)
        for shared, into, step in zip(
            *(x.T if by_channel else x for x in (page, out[entry, head], steps[entry, head])), strict=True
        ):
            scale = (shared.abs().max() / 127).bfloat16()
            if scale:
                codes = [max(-127, min(127, round(float(x / scale)))) for x in shared]
                into.copy_(torch.tensor(codes) * scale.float())
                step.fill_(float(scale))
    return out, steps


def rounded_bank(bank):
    """A plain bank, whose keys and values become what the definition makes of them."""
    for name, table in bank._tables.items():
        layer, _, part = name.rpartition(".")
        if part in ("keys", "values"):
            by_channel = part == "keys" and table.shape[1] >= 16
            mask = bank._tables[f"{layer.rpartition('.')[0]}.mask"]
            table.copy_(rounded(table.transpose(1, 2), mask, by_channel)[0].transpose(1, 2))
    return bank


def reload(model):
    model.adapters.load_state_dict({name: value * 0.5 for name, value in model.adapters.state_dict().items()})


def read_and_project(prepared, adapter, layer, queries=1):
    """The memory as an adapter reads it, and its cached keys and values for the block at a host layer."""
    values = prepared.values(adapter)
    memory = prepared.read(adapter, values)
    return memory, prepared.project(adapter, [layer], memory, queries, values)[layer]
