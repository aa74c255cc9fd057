"""Adapters come, stand beside others, are recomputed and go."""

from __future__ import annotations

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mmattn
from mmattn.errors import ConditionError, MmattnError
from mmattn.hosts.hooks import CrossAttentionHook
from mmattn.testing.case import no_trace, traces
from tests import tiny
from tests.tiny import assert_close, differs, own

ROWS = 3


def adapter(**settings):
    return mmattn.GatedAdapter(
        **{"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 8} | settings
    )


@pytest.mark.parametrize(
    ("family", "settings", "options", "same"),
    [
        ("llama", {}, {"path": "model.layers"}, {}),
        ("gpt_neo", {"layers": None, "every": 2}, {}, {"layers": (1, 3)}),
    ],
)
@torch.no_grad()
def test_ways_to_name_the_same_layers(family, settings, options, same, ids):
    """Invariant 30: a path, and every n-th, counted from the front."""
    model = tiny.open_gates(mmattn.attach(tiny.make(family), adapter(**settings), **options))
    want = tiny.open_gates(mmattn.attach(tiny.make(family), adapter(**same)))
    memory = tiny.memory(ROWS)
    assert torch.equal(model(ids, memory=memory).logits, want(ids, memory=memory).logits)


@torch.no_grad()
def test_unloading_twice_leaves_the_next_adapters_alone():
    """Invariant 28: what an earlier model gave back is not taken away from the next."""
    lm, ids, memory = tiny.make("llama"), tiny.text(3), tiny.memory(3)
    first = tiny.attach(lm)
    want = first(ids, memory=memory).logits
    assert first.unload() is lm
    again = tiny.attach(lm)
    assert first.unload() is lm
    assert torch.equal(again(ids, memory=memory).logits, want)
    assert again.half().adapter("default").weight.dtype is torch.float16 and again.unload() is lm


def test_layers_that_memory_cannot_reach(ids):
    """Invariant 30: where a layer is run without being called, what a hook returns is lost, and attaching says so."""
    lm = tiny.make("llama")
    kind = type(lm.model.layers[1])
    lm.model.layers[1].__class__ = type(
        "Deaf", (kind,), {"__call__": lambda self, *args, **kw: self.forward(*args, **kw)}
    )
    before = traces(lm)
    with pytest.raises(ConditionError, match=r"\[1\]"):
        tiny.attach(lm, layers=(0, 1, 2))
    no_trace(lm, before, "after attach was refused")
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, own(ids))
        assert torch.isfinite(tiny.attach(lm, layers=(0, 2))(ids, memory=tiny.memory(ROWS)).logits).all()


def test_nothing_is_kept_alive(model, ids):
    """Neither a call keeps its memory, nor a host the adapters it had."""
    memory = tiny.memory(ROWS)
    tokens = weakref.ref(memory.tokens)
    model(ids, labels=ids, memory=memory).loss.backward()
    model.generate(ids, memory=memory, max_new_tokens=2)
    with model.condition(memory):
        model.host.generate(ids, max_new_tokens=2)
    del memory
    gc.collect()
    assert tokens() is None
    lm = model.unload()
    other = tiny.attach(lm)
    handle, adapter = weakref.ref(other), weakref.ref(next(other.adapters.parameters()))
    other.unload()
    del other
    gc.collect()
    assert handle() is None and adapter() is None
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, own(ids))


class GradientCheckpointingLayer(torch.nn.Module):
    """As in transformers before 5.23: checkpointing wraps the call of a layer, hooks included."""

    gradient_checkpointing = False

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)


class OlderLayer(GradientCheckpointingLayer):
    """A decoder layer of such a transformers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


def older_host():
    """A host whose layers are checkpointed by older transformers."""
    lm = tiny.make("llama")
    layers = tiny.decoder_layers(lm)
    for i, layer in enumerate(layers):
        layers[i] = OlderLayer(layer)
    return lm


def checkpoint_older(lm, use_reentrant: bool) -> None:
    for layer in tiny.decoder_layers(lm):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=use_reentrant)


def gradients_of_two(model, texts, meanwhile):
    """Gradients of the adapters and of two memories after two forwards, and a third without one, and one backward."""
    memories = [mmattn.Memory(tiny.memory(ROWS, m=m, seed=m).tokens.requires_grad_()) for m in (5, 11)]
    losses = [
        model(text, labels=text, memory=one, use_cache=False).loss for text, one in zip(texts, memories, strict=True)
    ]
    bare = model(texts[0], labels=texts[0], use_cache=False).loss
    with meanwhile:
        (losses[0] + 2 * losses[1] + bare).backward()
    found = {name: parameter.grad for name, parameter in model.adapters.named_parameters()}
    return found | {f"memory {i}": one.tokens.grad for i, one in enumerate(memories)}


def test_hooks_that_run_again_in_the_backward_pass_see_the_memory_they_saw_first(ids):
    """Invariant 49."""
    gradients = []
    for checkpointed in (False, True):
        lm = older_host().train()
        before = traces(lm)
        model = tiny.attach(lm)
        if checkpointed:
            checkpoint_older(lm, use_reentrant=False)
        # Whatever is in force in the backward pass is none of theirs.
        block = model.condition(tiny.memory(ROWS, m=7, seed=7))
        gradients.append(gradients_of_two(model, (ids, ids.flip(1)), block))
        model.unload()
        for layer in tiny.decoder_layers(lm):
            assert "mmattn" not in type(layer.__dict__.pop("_gradient_checkpointing_func", None)).__module__
            layer.__dict__.pop("gradient_checkpointing", None)
        no_trace(lm, before, "after unload()")
    for name, want in gradients[0].items():
        assert want.abs().max() > 0, name
        assert_close(gradients[1][name], want)


def test_checkpointing_in_which_memory_or_gradients_would_be_lost_is_refused(ids):
    """Invariant 49."""
    model = tiny.attach(older_host()).train()
    checkpoint_older(model.host, use_reentrant=True)
    model.host.enable_input_require_grads()
    with pytest.raises(ConditionError, match="use_reentrant"):
        model(ids, labels=ids, memory=tiny.memory(ROWS), use_cache=False)
    layer, x = OlderLayer(torch.nn.Identity()), torch.randn(2, 3, 5)
    layer.gradient_checkpointing = True
    hook = CrossAttentionHook(model, 0, "after").after
    with pytest.raises(ConditionError, match="upgrade transformers"):
        hook(layer.train(), (x,), x)
    assert hook(layer.eval(), (x,), x) is x


@pytest.mark.parametrize("family", tiny.DISTINCT)
@pytest.mark.parametrize("used_before", [False, True])
@torch.no_grad()
def test_hidden_states_show_what_the_adapter_added(family, used_before, ids):
    lm, fed = tiny.make(family), []
    own = tiny.make(family)(ids, output_hidden_states=True).hidden_states
    if used_before:
        lm(ids, output_hidden_states=True)
    model = tiny.attach(lm, layers=(1,))
    tiny.decoder_layers(lm)[2].register_forward_pre_hook(
        lambda _, args, kwargs: fed.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    got = model(ids, memory=tiny.memory(ROWS), output_hidden_states=True).hidden_states
    assert len(got) == len(own)
    # What layer 1 gave and layer 2 got; a family without attention leaves the embeddings out.
    at = 1 if family in tiny.RUNNING_STATE else 2
    assert torch.equal(got[at - 1], own[at - 1]) and torch.equal(got[at], fed[0])
    assert differs(got[at], own[at]) and differs(got[-1], own[-1])


# Several named adapters on one host: what the contract suite does not ask of a second one


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
    assert (both.num_parameters(), both.num_parameters(only_trainable=True)) == (total, trained)
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
