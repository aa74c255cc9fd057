"""Attaching to a language host, living with it, and leaving it."""

from __future__ import annotations

import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mmattn
from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.hooks import AfterLayer
from tests import tiny
from tests.tiny import assert_close, own

ROWS, LENGTH = 3, 7


def test_a_second_adapter_of_the_same_name(model, ids):
    """Invariant 29."""
    memory = tiny.memory(ROWS)
    with torch.no_grad():
        want, names = model(ids, memory=memory).logits, list(model.state_dict())
    adapter = mmattn.GatedAdapter(memory_dim=13, layers=(1,), num_heads=2, head_dim=8)
    for attempt in (lambda: model.add_adapter("default", adapter), lambda: mmattn.attach(model.host, adapter)):
        with pytest.raises(AttachError, match="default"):
            attempt()
    with torch.no_grad():
        assert torch.equal(model(ids, memory=memory).logits, want)
    assert list(model.state_dict()) == names


def test_layers_that_are_not_there(ids):
    """Invariant 30."""
    lm = tiny.make("llama")
    keys = set(lm.__dict__)
    for settings, found in (
        ({"layers": (0, 3)}, "3"),
        ({"layers": (-7,)}, "3|-7"),
        ({"layers": None, "every": 5}, "3"),
        ({"layers": ()}, "layer"),
    ):
        with pytest.raises(MmattnError, match=found) as caught:
            tiny.attach(lm, **settings)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(AttachError, match="model.nowhere"):
        mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=13, layers=(0,)), path="model.nowhere")
    assert set(lm.__dict__) == keys and all(not part._forward_hooks for part in lm.modules())
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, own(ids))


def test_layers_that_memory_cannot_reach(ids):
    """Invariant 30: where a layer is run without being called, what a hook returns is lost, and attaching says so."""
    lm = tiny.make("llama")
    kind = type(lm.model.layers[1])
    lm.model.layers[1].__class__ = type(
        "Deaf", (kind,), {"__call__": lambda self, *args, **kw: self.forward(*args, **kw)}
    )
    before = [set(part.__dict__) for part in lm.modules()]
    with pytest.raises(ConditionError, match=r"\[1\]"):
        tiny.attach(lm, layers=(0, 1, 2))
    assert [set(part.__dict__) for part in lm.modules()] == before
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in lm.modules())
    assert all(parameter.requires_grad for parameter in lm.parameters())
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, own(ids))
        assert torch.isfinite(tiny.attach(lm, layers=(0, 2))(ids, memory=tiny.memory(ROWS)).logits).all()


@pytest.mark.parametrize("thing", [nn.Linear(5, 7), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), "gpt2", None])
def test_things_that_are_no_language_model(thing):
    """Invariant 30."""
    with pytest.raises((AttachError, TypeError)) as caught:
        mmattn.attach(thing, mmattn.GatedAdapter(memory_dim=13, layers=(0,)))
    assert isinstance(caught.value, MmattnError)
    with pytest.raises((TypeError, ValueError)) as caught:
        mmattn.attach(tiny.make("llama"), "gated")
    assert isinstance(caught.value, MmattnError)


def test_an_explicit_path_finds_the_same_layers(ids):
    """Invariant 30."""
    adapter = mmattn.GatedAdapter(memory_dim=13, layers=(0, 2), num_heads=2, head_dim=8)
    model = tiny.open_gates(mmattn.attach(tiny.make("llama"), adapter, path="model.layers"))
    with torch.no_grad():
        want = tiny.attach(tiny.make("llama"))(ids, memory=tiny.memory(ROWS)).logits
        assert torch.equal(model(ids, memory=tiny.memory(ROWS)).logits, want)


def test_every_counts_from_the_front():
    """Invariant 30."""
    model = tiny.attach(tiny.make("gpt_neo"), layers=None, every=2)
    spread = tiny.attach(tiny.make("gpt_neo"), layers=(1, 3))
    ids, memory = tiny.text(2), tiny.memory(2)
    with torch.no_grad():
        assert torch.equal(model(ids, memory=memory).logits, spread(ids, memory=memory).logits)


def test_layers_that_return_tuples_and_layers_that_do_not():
    """Invariant 31: the matrix runs both kinds; here is the proof that both are in it."""
    kinds = set()
    for family in ("llama", "gptj", "falcon"):
        lm = tiny.make(family)
        tiny.decoder_layers(lm)[0].register_forward_hook(lambda _, args, out: kinds.add(type(out)))
        lm(tiny.text(1))
    assert kinds == {tuple, torch.Tensor}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba"])
def test_the_hosts_file_is_the_hosts(family, tmp_path):
    """Invariant 33."""
    lm = tiny.make(family)
    state = {name: value.clone() for name, value in lm.state_dict().items()}
    model = tiny.attach(lm)
    assert list(lm.state_dict()) == list(state)
    lm.load_state_dict(state)
    lm.save_pretrained(tmp_path / "host")
    assert model.host is lm
    again, report = type(lm).from_pretrained(tmp_path / "host", output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"] and not report["mismatched_keys"]
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name]), name
    model.unload()
    lm.save_pretrained(tmp_path / "plain")
    for file in sorted((tmp_path / "plain").iterdir()):
        assert file.read_bytes() == (tmp_path / "host" / file.name).read_bytes(), file.name


def test_requires_grad_comes_back():
    """Invariant 34."""
    lm = tiny.make("gpt2")
    for i, parameter in enumerate(lm.parameters()):
        parameter.requires_grad_(i % 3 == 0)
    before = [parameter.requires_grad for parameter in lm.parameters()]
    model = tiny.attach(lm)
    assert not any(parameter.requires_grad for parameter in lm.parameters())
    trained, total = model.trainable_parameters()
    assert trained == sum(parameter.numel() for parameter in model.adapters.parameters())
    assert total == trained + sum(parameter.numel() for parameter in lm.parameters())
    model.unload()
    assert [parameter.requires_grad for parameter in lm.parameters()] == before


class Int8Linear(nn.Module):
    """A linear layer whose weight is stored in 8 bits, as quantised hosts have them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def test_an_8_bit_host(ids):
    """Invariant 35."""
    lm = tiny.make("llama")
    for part in list(lm.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear) and child is not lm.lm_head:
                setattr(part, name, Int8Linear(child))
    model = tiny.attach(lm)
    assert {parameter.dtype for parameter in model.adapters.parameters()} == {torch.float32}
    model(ids, labels=ids, memory=tiny.memory(ROWS)).loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.adapters.parameters())
    assert lm.model.layers[0].mlp.up_proj.weight.dtype == torch.int8


def test_pickling_names_the_verb(model):
    """Invariant 39."""
    for save in (pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
        with pytest.raises(TypeError, match="save_adapter"):
            save(model)


def test_without_memory_the_host_answers(model, ids):
    """Invariant 45."""
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own(ids))


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


def test_hooks_that_run_again_in_the_backward_pass_see_the_memory_they_saw_first(ids):
    texts = [ids, ids.flip(1)]
    gradients = []
    for checkpointed in (False, True):
        lm = older_host()
        traces = [sorted(part.__dict__) for part in lm.modules()]
        model = tiny.attach(lm).train()
        if checkpointed:
            checkpoint_older(lm, use_reentrant=False)
        memories = [mmattn.Memory(tiny.memory(ROWS, m=m, seed=m).tokens.requires_grad_()) for m in (5, 11)]
        losses = [
            model(text, labels=text, memory=one, use_cache=False).loss
            for text, one in zip(texts, memories, strict=True)
        ]
        bare = model(ids, labels=ids, use_cache=False).loss
        # Whatever is in force in the backward pass is none of theirs.
        with model.condition(tiny.memory(ROWS, m=7, seed=7)):
            (losses[0] + 2 * losses[1] + bare).backward()
        found = {name: parameter.grad for name, parameter in model.adapters.named_parameters()}
        gradients.append(found | {f"memory {i}": one.tokens.grad for i, one in enumerate(memories)})
        model.unload()
        for layer in tiny.decoder_layers(lm):
            assert "mmattn" not in type(layer.__dict__.pop("_gradient_checkpointing_func", None)).__module__
            layer.__dict__.pop("gradient_checkpointing", None)
        assert [sorted(part.__dict__) for part in lm.modules()] == traces
    for name, want in gradients[0].items():
        assert want.abs().max() > 0, name
        assert_close(gradients[1][name], want)


def test_checkpointing_in_which_memory_or_gradients_would_be_lost_is_refused(ids):
    model = tiny.attach(older_host()).train()
    checkpoint_older(model.host, use_reentrant=True)
    model.host.enable_input_require_grads()
    with pytest.raises(ConditionError, match="use_reentrant"):
        model(ids, labels=ids, memory=tiny.memory(ROWS), use_cache=False)
    layer, x = OlderLayer(torch.nn.Identity()), torch.randn(2, 3, 5)
    layer.gradient_checkpointing = True
    hook = AfterLayer(model, 0)
    with pytest.raises(ConditionError, match="upgrade transformers"):
        hook(layer.train(), (x,), x)
    assert hook(layer.eval(), (x,), x) is x
