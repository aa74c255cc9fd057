"""Cached prompts: a call on their last tokens is that of whole texts with `arrived=`, and costs the upper layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn.errors import ConditionError, ShapeError, TextError
from mmattn.training import cached_prompts
from tests import tiny

LENGTHS = (9, 5, 7, 9)
#: Rows of a batch: in another order, one of them twice.
ROWS = [2, 0, 2, 1]


def attach(family: str = "llama", **settings: Any) -> Any:
    """A host with adapters at its second and third layer."""
    return tiny.attach(tiny.make(family), **{"layers": (1, 2)} | settings)


def texts() -> list[list[int]]:
    """Four prompts, the last of which is the first."""
    ids = tiny.text(3, max(LENGTHS))
    return [ids[row % 3, : LENGTHS[row]].tolist() for row in range(4)]


def step(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """The gradients of a loss of the next token."""
    model.zero_grad()
    F.cross_entropy(logits[:, -1], torch.arange(len(logits))).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name != "mamba"])
def test_a_step_is_that_of_whole_texts_whose_last_token_sees_the_memory(family: str) -> None:
    """Invariant 141: logits, and the gradients of every weight of the adapter."""
    model, memory = attach(family), tiny.memory(4, lengths=[5, 2, 3, 4])
    ids, mask = tiny.left_padded([torch.tensor(texts()[row]) for row in ROWS])
    arrived = torch.zeros_like(ids)
    arrived[:, -1] = memory.tokens.shape[1]
    given = {"attention_mask": mask}
    if family not in ("bloom", "mpt"):
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, **given, memory=memory, arrived=arrived).logits[:, -1:]
    want = step(model, whole)
    with cached_prompts(model, texts()) as prompts:
        logits = model(**prompts[ROWS], memory=memory).logits
        got = step(model, logits)
    tiny.assert_close(logits, whole, 1e-4)
    assert got.keys() == want.keys() and len(got) > 10
    for name, gradient in want.items():
        if gradient.norm() > 1e-3:
            tiny.assert_close(got[name], gradient, 1e-3)


def test_only_upper_layers_run_on_the_last_tokens() -> None:
    """And without a memory, or with the adapter disabled, it is the bare host on the whole text."""
    model, memory, lengths = attach(), tiny.memory(4), []
    ids, mask = tiny.left_padded([torch.tensor(texts()[row]) for row in ROWS])
    bare = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, -1:]
    with cached_prompts(model, texts(), batch_size=2) as prompts:
        assert len(prompts) == 4 and len(prompts.states) == 3, "equal prompts are read once"
        for layer in model.layers:
            layer.mlp.register_forward_pre_hook(lambda mlp, args: lengths.append(args[0].shape[1]))
        seen = model(**prompts[ROWS], memory=memory).logits
        assert lengths == [1], "of three layers the third"
        blind = model(**prompts[ROWS]).logits
        with model.disable_adapter():
            disabled = model(**prompts[torch.tensor(ROWS)], memory=memory).logits
        whole = model(ids, attention_mask=mask, memory=memory).logits
    tiny.assert_close(blind, bare, 1e-4)
    assert torch.equal(blind, disabled) and not torch.allclose(seen, blind, atol=1e-3)
    assert torch.equal(whole, model(ids, attention_mask=mask, memory=memory).logits), "other calls run the whole host"


def test_arguments_serve_one_call() -> None:
    model, memory = attach(), tiny.memory(2)
    with cached_prompts(model, texts()) as prompts:
        arguments = prompts[[0, 1]]
        model(**arguments, memory=memory)
        with pytest.raises(ConditionError, match=r"serve one call: take prompts\[rows\] for each call"):
            model(**arguments, memory=memory)
        with pytest.raises(ConditionError, match="serve one call"):
            model.generate(**prompts[[0, 1]], memory=memory, max_new_tokens=3)


def test_a_changed_or_trained_host_is_refused() -> None:
    """Keys and values of prompts are those of the weights that read them."""
    model, memory = attach(), tiny.memory(2)
    weight = model.host.lm_head.weight
    with cached_prompts(model, texts()) as prompts:
        weight.requires_grad_()
        with pytest.raises(ConditionError, match="is trained, or its weights"):
            model(**prompts[[0, 1]], memory=memory)
        weight.requires_grad_(False).mul_(2)
        with pytest.raises(ConditionError, match="is trained, or its weights"):
            model(**prompts[[0, 1]], memory=memory)
    weight.requires_grad_()
    with pytest.raises(ConditionError, match="is trained, so no prompt"), cached_prompts(model, texts()):
        pass


def test_arguments_of_a_block_serve_no_call_outside_it() -> None:
    """Invariant 144: only the length of what the lower layers read is kept; a copy or a later call has no keys."""
    model, memory = attach(), tiny.memory(2)
    with cached_prompts(model, texts()) as prompts:
        early, copied = prompts[[0, 1]], copy.deepcopy(prompts[[0, 1]])
        with pytest.raises(ConditionError, match="inside their block"):
            model(**copied, memory=memory)
    for given in (early, prompts[[0, 1]]):
        with pytest.raises(ConditionError, match="inside their block"):
            model(**given, memory=memory)


def test_checkpointing_is_refused() -> None:
    """transformers leaves the cache out there."""
    model = attach()
    tiny.checkpoint(model.host, use_reentrant=False)
    model.train()
    with cached_prompts(model, texts()) as prompts:
        with pytest.raises(ConditionError, match="checkpoints gradients"):
            model(**prompts[[0, 1]], memory=tiny.memory(2))
        with torch.no_grad():
            model.eval()(**prompts[[0, 1]], memory=tiny.memory(2))


@pytest.mark.parametrize(
    ("settings", "prompts", "error", "message"),
    [
        ({}, [], TextError, "prompts .* have no token"),
        ({}, [[1, 2], [3]], TextError, r"prompts \[1\] have no token before the last"),
        ({}, [[1, 2, tiny.VOCAB]], ShapeError, f"ids from 1 to {tiny.VOCAB}"),
        ({"family": "gpt2"}, [[1] * 131], ShapeError, "of up to 131 tokens are longer"),
        ({"layers": (0,), "position": "before"}, texts(), ConditionError, "below all trained ones"),
        ({"family": "mamba"}, texts(), ConditionError, "does not cache keys and values of each layer"),
    ],
)
def test_prompts_that_cannot_be_cached(settings: Any, prompts: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message), cached_prompts(attach(**settings), prompts):
        pass


def test_beside_cached_hidden_states(tmp_path) -> None:
    """Both blocks may be open: each call starts from its own states."""
    model, memory = attach(), tiny.memory(2)
    ids = tiny.text(2, 5)
    whole = model(ids, memory=memory).logits
    with cached_prompts(model, ids.tolist()) as prompts, mmattn.training.cached_hidden_states(model, tmp_path) as cache:
        last = model(**prompts[[0, 1]], memory=memory).logits
        again = model(ids, memory=memory).logits
        assert cache.computed == 2
        assert torch.equal(model(**prompts[[0, 1]], memory=memory).logits, last)
    tiny.assert_close(again, whole, 1e-4)
