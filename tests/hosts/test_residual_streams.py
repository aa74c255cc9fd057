"""Hosts with several residual streams for each token: adapters read their mean, and add to every one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import mmattn
from mmattn.errors import AttachError
from tests import tiny
from tests.families.building import MEMORY_DIM, tiny_model

IDS = torch.tensor([[5, 9, 3, 7], [4, 4, 6, 12], [8, 11, 6, 3]])  # as many tokens as streams


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize(("family", "axis"), [("deepseek_v4", 2), ("hy_v4", 2), ("gemma3n_text", 0)])
def test_a_row_sees_its_memory_whatever_the_batch(family: str, axis: int, position: str) -> None:
    """Also where as many rows or tokens are given as there are streams."""
    host = tiny_model(family, AutoModelForCausalLM)
    settings = mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 2), num_heads=2, position=position)
    model = tiny.open_gates(mmattn.attach(host, settings))
    assert model.stream_axis == axis
    memory = mmattn.Memory(torch.randn(3, 5, MEMORY_DIM))
    with torch.no_grad():
        together = model(IDS, memory=memory).logits
        assert tiny.differs(together, host(input_ids=IDS).logits)
        for row in range(3):
            tiny.assert_close(model(IDS[row : row + 1], memory=memory[row]).logits, together[row : row + 1], 1e-5)


def test_layers_of_two_kinds_are_refused() -> None:
    """A host of which some layers hand on several streams, and others one."""
    host = tiny.make("llama")
    host.model.layers[1].register_forward_hook(lambda layer, args, output: torch.stack([output] * 4, 2))
    host.model.layers[2].register_forward_pre_hook(lambda layer, args: (args[0].mean(2), *args[1:]))
    with pytest.raises(AttachError, match="some layers .* several residual streams"):
        mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 1), num_heads=2))
    mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 2), num_heads=2))
