"""Every family through every way of generating: the tokens are those of one row at a time, each with its own memory.

Padding, beams and each token beside a forward are in `tests/families/checks.py`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from tests import tiny

ROWS, LENGTH, NEW = 3, 7, 5


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """A host with open adapters, and the greedy continuation of each row made alone."""
    ids, memory = tiny.text(ROWS, LENGTH), tiny.memory(ROWS, lengths=[5, 2, 3])
    s = SimpleNamespace(model=tiny.attach(tiny.make(family)), ids=ids, memory=memory)
    s.rows = torch.cat([generate(s.model, ids[i : i + 1], memory=memory[i]) for i in range(ROWS)])
    assert not torch.equal(s.rows, generate(s.model.host, ids))
    return s


@torch.no_grad()
def generate(model, ids, **kwargs):
    """New tokens only (b, NEW)."""
    out = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)
    return out[:, ids.shape[1] :]


CACHES = {
    "a batch": {},
    "off": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 3},
}
# The assistant reads no memory; one is right about the host without adapters, the other about nothing.
DRAFTS = {
    "assistant": {"assistant": 0},
    "another tongue": {"assistant": 1},
    "prompt lookup": tiny.PROMPT_LOOKUP,
}


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(tiny.FAMILIES, CACHES))
def test_caches_agree(family, how):
    """Invariants 52, 54."""
    s, order = scene(family), torch.tensor([2, 0, 1])
    assert torch.equal(generate(s.model, s.ids[order], memory=s.memory[order], **how), s.rows[order])


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(tiny.FAMILIES, DRAFTS))
def test_drafts_do_not_change_the_answer(family, how):
    """Invariant 53."""
    s = scene(family)
    if "assistant" in how:
        how = {"assistant_model": tiny.make(family, seed=how["assistant"])}
    for i in range(2):
        assert torch.equal(generate(s.model, s.ids[i : i + 1], memory=s.memory[i], **how), s.rows[i : i + 1])


@pytest.mark.parametrize("beams", [2, 3])
def test_beams_see_the_slots_that_had_arrived_in_their_row(beams):
    """Invariant 189."""
    model, ids, memory = tiny.attach(tiny.make("llama")), tiny.text(3), tiny.memory(3)
    arrived = torch.stack([torch.arange(7), torch.arange(7).clamp(max=1), torch.full((7,), 5)]).clamp(max=5)
    found = generate(model, ids, memory=memory, arrived=arrived, num_beams=beams)
    for row in range(3):
        alone = generate(model, ids[[row]], memory=memory[row], arrived=arrived[[row]], num_beams=beams)
        assert torch.equal(found[[row]], alone)
    assert not torch.equal(found, generate(model, ids, memory=memory, num_beams=beams))
