"""Hosts that already see: a further memory for their text part, beside pictures of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import mmattn
from tests import tiny
from tests.families.building import MEMORY_DIM, tiny_model

HOSTS = {"llava": 16, "internvl": 4}  # tokens that stand for a picture
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=HOSTS)
def told(request: pytest.FixtureRequest) -> tuple[Any, dict[str, torch.Tensor]]:
    """An adapted host, and two texts about a picture each."""
    host = tiny_model(request.param, AutoModelForImageTextToText)
    token = host.config.image_token_id
    picture = torch.full((2, HOSTS[request.param]), token)
    ids = torch.cat([torch.full((2, 1), 5), picture, torch.tensor([[7, 8, 9], [3, 2, 6]])], 1)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 2), num_heads=2))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": PICTURES}


@torch.no_grad()
def test_its_own_pictures_and_a_memory(told: tuple[Any, dict[str, torch.Tensor]]) -> None:
    """Both are seen, each by its own row; a fresh adapter changes nothing."""
    model, given = told
    alone = model.host(**given).logits
    assert torch.equal(model(**given, memory=tiny.memory(2)).logits, alone)
    tiny.open_gates(model)
    both = model(**given, memory=tiny.memory(2)).logits
    assert tiny.differs(both, alone)
    other = {**given, "pixel_values": torch.stack([PICTURES[0], PICTURES[1].flip(1)])}
    changed = model(**other, memory=tiny.memory(2)).logits
    tiny.assert_close(changed[0], both[0], 1e-5)
    assert tiny.differs(changed[1:], both[1:], 1e-3), "its own picture is no longer seen"
    assert torch.equal(model(**given).logits, alone)


def test_it_writes_about_both(told: tuple[Any, dict[str, torch.Tensor]]) -> None:
    model, given = told
    tiny.open_gates(model)
    for ways in ({}, {"num_beams": 2}):
        settings = {"max_new_tokens": 4, "do_sample": False, **ways}
        texts = model.generate(**given, memory=tiny.memory(2), **settings)
        for row in range(2):
            own = {name: value[row : row + 1] for name, value in given.items()}
            assert torch.equal(model.generate(**own, memory=tiny.memory(2)[row], **settings)[0], texts[row])
