"""On a card: no value is waited for in a forward, a token, or passages; graphs; what is found out late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mmattn
from mmattn.adapters import PassageAdapter
from mmattn.adapters.host_models import cache_name
from mmattn.errors import NonFiniteError
from mmattn.hosts import PassageCache
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Inside the block torch raises where the CPU would wait for the card."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attach() -> Any:
    return tiny.open_gates(tiny.attach(tiny.make("llama").cuda(), layers=(1, 2)))


def memories(model: Any) -> dict[str, Any]:
    """Memories of three rows by kind, on the card."""
    padded = tiny.memory(3, 7, lengths=[7, 2, 5]).to("cuda")
    return {
        "none": None, "tensor": padded.tokens, "padded": padded, "prepared": model.prepare(padded),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "tensor", "padded", "prepared"])
@torch.no_grad()
def test_a_text_and_a_token(kind: str) -> None:
    """Invariant 219: with every kind of memory, one that is new among them."""
    model, ids = attach(), tiny.text(3, 5).cuda()
    cache = DynamicCache(config=model.config)
    name = cache_name(model.host)
    for _ in range(2):  # the first call chooses kernels, and may check a host once
        memory = memories(model)[kind]
        with no_waits():
            logits = model(ids, memory=memory, use_cache=True, **{name: cache}).logits
            model(ids[:, :1], memory=memory, use_cache=True, **{name: cache})
        assert logits.isfinite().all()
        cache = DynamicCache(config=model.config)


@torch.no_grad()
def test_passages() -> None:
    """Invariant 219: passages that the host has read are selected and attended to."""
    model = mmattn.attach(tiny.make("llama").cuda(), PassageAdapter())
    passages, question = PassageCache(model), tiny.text(1, 3).cuda()
    passages.add([[5, 6, 7], [8, 9], [11, 12, 13, 14, 15]], progress=False)
    model(question, memory=passages.select([[0, 2]]))
    with no_waits():
        logits = model(question, memory=passages.select([[2, 1]])).logits
    assert logits.isfinite().all()


@torch.no_grad()
def test_a_memory_that_is_not_finite() -> None:
    """Invariant 219: it is refused by the end of `generate`, and no later call is refused for it."""
    model, ids = attach(), tiny.text(3, 5).cuda()
    new = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    good = tiny.memory(3, 7).to("cuda")
    want = model.generate(ids, memory=good, **new)
    bad = good.tokens.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(NonFiniteError):
        model.generate(ids, memory=mmattn.Memory(bad), **new)
    assert torch.equal(model.generate(ids, memory=good, **new), want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of what it does not follow
@torch.no_grad()
def test_one_graph_for_each_token() -> None:
    """Invariant 219: compiled as a whole, into CUDA graphs, with the memory of each call."""
    torch._dynamo.reset()
    model, ids = attach(), tiny.text(3, 5).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for seed in (0, 1, 0, 2):
        memory = model.prepare(tiny.memory(3, 7, seed=seed).to("cuda"))
        tiny.assert_close(compiled(ids, memory=memory).logits.clone(), model(ids, memory=memory).logits)
