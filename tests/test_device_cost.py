"""What a GPU would pay beyond the bare model: operations that launch a kernel, and waits for values.

Counted on the CPU, where the numbers are the same on every machine. Passages are counted in
tests/kv_store/test_passage_cost.py, steps of a diffusion model in tests/hosts/diffusion/test_compiled.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import mmattn
from tests import tiny
from tests.device import act_as_device, beyond, count

LAYERS = 4  # of eight have an adapter
SLOTS = torch.arange(17) < torch.tensor([[9], [17]])
IDS = torch.ones(2, 6, dtype=torch.long)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    act_as_device(monkeypatch)


@torch.no_grad()
def test_cross_attention() -> None:
    """Invariant 206. Four products and one attention; a mask and hiding what lies in padding are one operation each."""
    layer, x, memory = mmattn.CrossAttention(64, 48, 4), torch.randn(2, 6, 64), torch.randn(2, 17, 48)
    assert beyond(lambda: layer(x, memory), lambda: None) == 5
    assert beyond(lambda: layer(x, memory, mask=SLOTS), lambda: None) <= 5 + 2
    once = layer.project(memory, mask=SLOTS)
    assert beyond(lambda: layer(x, once), lambda: None) <= 3 + 1


@torch.no_grad()
def test_cross_attention_with_biases() -> None:
    """Rows without slots must be found, and their output set to 0: of what the biases would leave there."""
    layer, x, memory = mmattn.CrossAttention(64, 48, 4, bias=True), torch.randn(2, 6, 64), torch.randn(2, 17, 48)
    assert beyond(lambda: layer(x, memory, mask=SLOTS), lambda: None) <= 5 + 4
    assert not layer(x, memory, mask=SLOTS & (torch.arange(2) > 0)[:, None])[0].any()


def make_models() -> tuple[Any, Any]:
    """A host of eight layers, bare and adapted, with open gates."""
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=97,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    host = LlamaForCausalLM(config).eval().requires_grad_(False)
    return copy.deepcopy(host), tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(memory_dim=48, every=2)))


#: Whether a memory is new in each call or prepared, whether it is padded, and the operations of a layer.
MEMORIES: dict[str, tuple[bool, bool, float]] = {
    "new": (True, False, 16),
    "new, padded": (True, True, 16),
    "prepared": (False, False, 11),
    "prepared, padded": (False, True, 11),
}


@pytest.mark.parametrize("kind", MEMORIES)
@torch.no_grad()
def test_texts_and_tokens(kind: str) -> None:
    """Invariant 206. A norm, two products, the attention and a gated sum; and the same for the feed-forward."""
    is_new, pads, budget = MEMORIES[kind]
    bare, model = make_models()
    tokens, mask = torch.randn(2, 17, 48), SLOTS if pads else None
    prepared = model.prepare(mmattn.Memory(tokens, mask))
    memories = iter([mmattn.Memory(tokens, mask) for _ in range(5)])

    def memory() -> object:
        return next(memories) if is_new else prepared

    cache = DynamicCache(config=bare.config)
    model(IDS, **tiny.going_on(cache), memory=memory())
    other = DynamicCache(config=bare.config)
    bare(IDS, **tiny.going_on(other))
    more = beyond(
        lambda: model(IDS[:, :1], **tiny.going_on(cache), memory=memory()),
        lambda: bare(IDS[:, :1], **tiny.going_on(other)),
    )
    assert more <= budget * LAYERS
    # The logits of a text are looked at once: their largest, and what becomes of it.
    assert beyond(lambda: model(IDS, memory=memory()), lambda: bare(IDS)) <= budget * LAYERS + 4


@torch.no_grad()
def test_a_memory_and_calls_without() -> None:
    bare, model = make_models()
    assert beyond(lambda: model(IDS), lambda: bare(IDS)) == 0
    assert beyond(lambda: mmattn.Memory(torch.randn(2, 17, 48), SLOTS), lambda: None) <= 5


def test_a_training_step() -> None:
    """Invariant 206."""
    _, model = make_models()
    model.train()

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        memory = mmattn.Memory(torch.randn(2, 17, 48), SLOTS)
        model(IDS, labels=IDS, memory=memory).loss.backward()

    assert len(count(step).waits) == 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.no_grad()
def test_a_host_of_each_family_waits_no_longer(family: str) -> None:
    """Invariant 206."""
    bare, model = tiny.make(family), tiny.attach(tiny.make(family))
    memory, ids = tiny.memory(3, lengths=[5, 0, 3]), tiny.text(3)
    assert beyond(lambda: model(ids, memory=memory), lambda: bare(ids)) > 0
