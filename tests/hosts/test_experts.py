"""Hosts with experts, where rows share matrix products: what a row without memory is promised there.

Its adapter adds exactly nothing. But an expert multiplies the tokens of all rows together, so the host itself changes a
row by rounding when another row changes; and a memory changes other rows.
"""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import mmattn
from tests import tiny
from tests.tiny import assert_close, differs

ROWS = 3
SIZES = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
    | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
ROUNDING = 1e-5


def make(family: str):
    torch.manual_seed(5)
    lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | FAMILIES[family])).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2)
    return lm


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_row_without_memory_is_the_hosts_own_up_to_the_hosts_rounding(family, ids):
    lm = make(family)
    own, alone = lm(ids).logits, lm(ids[1:2]).logits[0]
    model = tiny.attach(lm)
    memory = tiny.memory(ROWS, lengths=[5, 0, 3])
    got = model(ids, memory=memory).logits
    assert_close(got[1], own[1], ROUNDING)
    assert differs(got[[0, 2]], own[[0, 2]])
    # Where no row has a memory nothing changes, and neither do rows whose host saw the same companions.
    empty = mmattn.Memory(memory.tokens, torch.zeros(ROWS, 5, dtype=torch.bool))
    assert torch.equal(model(ids, memory=empty).logits, own)
    assert torch.equal(model(ids[1:2], memory=empty[1]).logits[0], alone)
    assert torch.equal(model(ids, memory=memory, adapter_scale=0).logits, own)
    with model.disable_adapter():
        assert torch.equal(model(ids, memory=memory).logits, own)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_adapter_itself_passes_that_row_bit_for_bit(family, ids):
    """What goes into the blocks of an adapter in a row without memory comes out of them."""
    model, states = tiny.attach(make(family)), []

    def note(block, args, output):
        states.append((args[0][1].clone(), output[1].clone()))

    hooks = [model.adapters["default"].block(layer).register_forward_hook(note) for layer in (0, 2)]
    model(ids, memory=tiny.memory(ROWS, lengths=[5, 0, 3]))
    for hook in hooks:
        hook.remove()
    assert len(states) == 2 and all(torch.equal(before, after) for before, after in states)
