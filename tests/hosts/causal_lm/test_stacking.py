"""A host with more than one guest: several named adapters, a peft LoRA, a compiler, and many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.testing

import mmattn
from mmattn.errors import MmattnError
from tests import tiny
from tests.tiny import assert_close, differs, own

ROWS, LENGTH = 3, 7
# peft 0.21 asks transformers 5.23 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

GATED = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(1,), num_heads=2, head_dim=8)


# Named adapters


@torch.no_grad()
def test_blocks_within_blocks_disable_what_each_names(ids):
    """Invariant 190."""
    model, memory = tiny.attach(tiny.make("llama"), name="eye"), tiny.memory(ROWS)
    tiny.attach(model, name="ear", layers=(1,))
    model.set_adapter(["eye", "ear"])
    both = model(ids, memory=memory).logits
    with model.disable_adapter("ear"):
        eye = model(ids, memory=memory).logits
        with model.disable_adapter("eye"):
            assert torch.equal(model(ids, memory=memory).logits, own(ids))
        assert torch.equal(model(ids, memory=memory).logits, eye) and differs(eye, both)
    assert torch.equal(model(ids, memory=memory).logits, both)


@torch.no_grad()
def test_adapters_are_switched_combined_disabled_and_deleted_by_name(ids):
    memory = tiny.memory(ROWS)
    model = tiny.attach(tiny.make("llama"), name="eye")
    eye = model(ids, memory=memory).logits
    model.add_adapter("ear", GATED)
    with pytest.raises(MmattnError, match="ear"):
        model.add_adapter("ear", GATED)
    assert set(model.adapters) == {"eye", "ear"}
    # A fresh adapter adds nothing to one that reads.
    model.set_adapter(["eye", "ear"])
    assert torch.equal(model(ids, memory=memory).logits, eye)
    tiny.open_gates(model)
    model.set_adapter("eye")
    assert torch.equal(model(ids, memory=memory).logits, eye)
    model.set_adapter("ear")
    ear = model(ids, memory=memory).logits
    assert differs(ear, eye) and differs(ear, own(ids))
    model.set_adapter(["eye", "ear"])
    both = model(ids, memory=memory).logits
    assert differs(both, eye) and differs(both, ear)
    # A memory for each by name; one that is given none stays silent.
    assert torch.equal(model(ids, memory={"eye": memory, "ear": memory}).logits, both)
    assert torch.equal(model(ids, memory={"eye": memory}).logits, eye)
    assert differs(model(ids, memory={"eye": memory, "ear": tiny.memory(ROWS, m=11, seed=1)}).logits, both)
    with pytest.raises(MmattnError, match="nose"):
        model(ids, memory={"nose": memory})
    with model.disable_adapter("ear"):
        assert torch.equal(model(ids, memory=memory).logits, eye)
    with model.disable_adapter():
        assert torch.equal(model(ids, memory=memory).logits, own(ids))
    assert torch.equal(model(ids, memory=memory).logits, both)
    with pytest.raises(MmattnError, match="eye.*ear|ear.*eye"):
        model.set_adapter("nose")
    with pytest.raises(MmattnError, match="nose"):
        model.delete_adapter("nose")
    assert torch.equal(model(ids, memory=memory).logits, both)
    model.delete_adapter("ear")
    assert set(model.adapters) == {"eye"}
    model.set_adapter("eye")
    assert torch.equal(model(ids, memory=memory).logits, eye)
    assert torch.equal(model.unload()(ids).logits, own(ids))


def test_only_active_adapters_learn(ids):
    model = tiny.attach(tiny.make("llama"), name="eye").train()
    model.add_adapter("ear", GATED)
    tiny.open_gates(model)
    model.set_adapter("ear")
    model(ids, labels=ids, memory=tiny.memory(ROWS)).loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.adapters["eye"].parameters())
    assert all(parameter.grad.abs().max() > 0 for parameter in model.adapters["ear"].parameters())


@torch.no_grad()
def test_named_adapters_are_saved_one_by_one(ids, tmp_path):
    memory = tiny.memory(ROWS)
    model = tiny.attach(tiny.make("llama"), name="eye")
    model.add_adapter("ear", GATED)
    tiny.open_gates(model)
    model.set_adapter("ear")
    want = model(ids, memory=memory).logits
    model.save_adapter(tmp_path / "ear", name="ear")
    other = mmattn.load(tiny.make("llama"), tmp_path / "ear", name="other")
    assert set(other.adapters) == {"other"}
    assert torch.equal(other(ids, memory=memory).logits, want)
    # Onto a host that has one already, by whichever object; a failed load changes nothing.
    assert mmattn.attach(other, GATED, name="third") is other
    assert mmattn.load(other.host, tmp_path / "ear", name="second") is other
    assert set(other.adapters) == {"other", "third", "second"}
    other.set_adapter("second")
    assert torch.equal(other(ids, memory=memory).logits, want)
    for name, folder in (("second", "ear"), ("fourth", "nowhere")):
        with pytest.raises((MmattnError, OSError)):
            mmattn.load(other.host, tmp_path / folder, name=name)
    assert set(other.adapters) == {"other", "third", "second"}
    assert torch.equal(other(ids, memory=memory).logits, want)


def test_verbs_that_users_of_peft_know(capsys, ids):
    model = tiny.attach(tiny.make("llama"))
    trained, total = model.trainable_parameters()
    model.print_trainable_parameters()
    printed = capsys.readouterr().out
    assert f"{trained:,}" in printed and f"{total:,}" in printed and "%" in printed


# Compiled hosts: of one layer, because tracing is what takes the time


def shallow():
    return tiny.make("llama", num_hidden_layers=1)


def memories():
    """Lengths, masks and absence in turn: what one compiled model is asked in its life."""
    for m in (5, 7, 9, 11):
        yield tiny.memory(ROWS, m=m, seed=m)
        yield tiny.memory(ROWS, m=m, lengths=[m, 0, 3], seed=m)
    yield None


@pytest.mark.parametrize("compiled", ["host", "model"])
@torch.no_grad()
@pytest.mark.slow
def test_a_compiled_host_reads_each_memory_it_is_given(ids, compiled, dynamo):
    """Invariant 38."""
    model = tiny.attach(shallow(), layers=(0,))
    given = list(memories()) if compiled == "host" else [tiny.memory(ROWS), tiny.memory(ROWS, m=7), None]
    want = [model(ids, memory=memory).logits for memory in given]
    # Inside a block the host is one graph, and a break is an error; the adapted model stays outside of it.
    thing = model.host if compiled == "host" else model
    fast = torch.compile(thing, backend=dynamo, fullgraph=compiled == "host")
    for _ in range(2):
        for memory, expected in zip(given, want, strict=True):
            if compiled == "model":
                got = fast(ids, memory=memory).logits
            else:
                with model.condition(memory):
                    got = fast(ids).logits
            assert_close(got, expected, 1e-6)
    assert not torch._dynamo.utils.counters["graph_break"]
    # One for each of: no memory, and with or without a mask, of a first length and of any.
    assert 1 <= dynamo.frame_count <= 5, f"{dynamo.frame_count} graphs for {len(given)} memories"


@pytest.mark.slow
def test_training_a_compiled_host(ids, dynamo):
    """Invariant 38."""
    memory = tiny.memory(ROWS, lengths=[5, 0, 3])
    gradients = []
    for compiled in (False, True):
        model = tiny.attach(shallow(), layers=(0,)).train()
        host = torch.compile(model.host, backend=dynamo, fullgraph=True) if compiled else model.host
        with model.condition(memory):
            loss = host(ids, labels=ids).loss
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.adapters.named_parameters()})
    assert dynamo.frame_count == 1
    for name, want in gradients[0].items():
        assert_close(gradients[1][name], want)


@torch.no_grad()
@pytest.mark.slow
def test_attaching_after_the_host_was_compiled_is_never_silent(ids, dynamo):
    """Invariant 37."""
    lm = shallow()
    fast = torch.compile(lm, backend=dynamo)
    plain = fast(ids).logits
    assert_close(plain, shallow()(ids).logits, 1e-6)
    try:
        model = tiny.attach(lm, layers=(0,))
        with model.condition(tiny.memory(ROWS)):
            got = fast(ids).logits
    except MmattnError as error:
        assert "compile" in str(error)
    else:
        assert_close(got, model(ids, memory=tiny.memory(ROWS)).logits, 1e-6)
        assert differs(got, plain)
        model.unload()
        assert_close(fast(ids).logits, plain, 1e-6)


def test_a_compiled_model_is_not_a_host(dynamo):
    """Invariant 37."""
    lm = shallow()
    with pytest.raises(MmattnError, match="compile"):
        tiny.attach(torch.compile(lm, backend=dynamo), layers=(0,))
    lm.compile(backend=dynamo)
    with pytest.raises(MmattnError, match="compile"):
        tiny.attach(lm, layers=(0,))


# Threads


def test_disabling_in_one_thread_does_not_blind_another(ids):
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(ROWS)
    with torch.no_grad():
        want = model(ids, memory=memory).logits

    def look():
        with torch.no_grad():
            return model(ids, memory=memory).logits

    with ThreadPoolExecutor(1) as pool, model.disable_adapter():
        assert torch.equal(look(), own(ids))
        assert torch.equal(pool.submit(look).result(), want)
