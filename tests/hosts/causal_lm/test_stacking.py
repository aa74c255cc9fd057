"""Several named adapters on one host: what the contract suite does not ask of a second one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mmattn
from mmattn.errors import MmattnError
from tests import tiny
from tests.tiny import differs, own

ROWS = 3
GATED = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(1,), num_heads=2, head_dim=8)


@pytest.fixture
def both():
    """A host with two open adapters, "eye" and "ear"."""
    model = tiny.attach(tiny.make("llama"), name="eye")
    model.add_adapter("ear", GATED)
    return tiny.open_gates(model)


@torch.no_grad()
def test_blocks_within_blocks_disable_what_each_names(both, ids):
    """Invariant 190."""
    memory = tiny.memory(ROWS)
    together = both(ids, memory=memory).logits
    assert torch.equal(both(ids, memory={"eye": memory, "ear": memory}).logits, together)
    with both.disable_adapter("ear"):
        eye = both(ids, memory=memory).logits
        with both.disable_adapter("eye"):
            assert torch.equal(both(ids, memory=memory).logits, own(ids))
        assert torch.equal(both(ids, memory=memory).logits, eye) and differs(eye, together)
    assert torch.equal(both(ids, memory=memory).logits, together)


@pytest.mark.parametrize("verb", ["set_adapter", "delete_adapter"])
def test_a_name_that_is_not_there_is_refused_with_those_that_are(both, verb):
    with pytest.raises(MmattnError, match="eye.*ear"):
        getattr(both, verb)("nose")
    assert list(both.adapters) == both.active == ["eye", "ear"]


def test_only_active_adapters_learn(both, ids):
    both.set_adapter("ear")
    both.train()(ids, labels=ids, memory=tiny.memory(ROWS)).loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in both.adapters["eye"].parameters())
    assert all(parameter.grad.abs().max() > 0 for parameter in both.adapters["ear"].parameters())


@torch.no_grad()
def test_a_saved_adapter_is_loaded_beside_others(both, ids, tmp_path):
    memory = tiny.memory(ROWS)
    both.save_adapter(tmp_path, name="ear")
    both.set_adapter("ear")
    want = both(ids, memory=memory).logits
    other = mmattn.attach(tiny.make("llama"), GATED, "third")
    # Onto a host that has one already, by whichever object; a failed load changes nothing.
    assert mmattn.load(other.host, tmp_path, name="second") is other
    for name, folder in (("second", tmp_path), ("fourth", tmp_path / "nowhere")):
        with pytest.raises((MmattnError, OSError)):
            mmattn.load(other.host, folder, name=name)
    assert list(other.adapters) == ["third", "second"]
    other.set_adapter("second")
    assert torch.equal(other(ids, memory=memory).logits, want)


def test_the_count_that_users_of_peft_know(both, capsys):
    trained, total = both.trainable_parameters()
    assert trained == sum(parameter.numel() for parameter in both.adapters.parameters())
    assert total == trained + sum(parameter.numel() for parameter in both.host.parameters())
    both.print_trainable_parameters()
    printed = capsys.readouterr().out
    assert f"{trained:,}" in printed and f"{total:,}" in printed and "%" in printed


@torch.no_grad()
def test_disabling_in_one_thread_does_not_blind_another(model, ids):
    memory = tiny.memory(ROWS)
    want = model(ids, memory=memory).logits

    @torch.no_grad()
    def look():
        return model(ids, memory=memory).logits

    with ThreadPoolExecutor(1) as pool, model.disable_adapter():
        assert torch.equal(look(), own(ids))
        assert torch.equal(pool.submit(look).result(), want)
