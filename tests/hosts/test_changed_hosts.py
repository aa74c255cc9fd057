"""A host whose layers are replaced, wrapped or left out after attach: memory arrives, or the call says it does not."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from mmattn.errors import ConditionError
from tests import tiny, tiny_unets
from tests.tiny import differs

ROWS = 3


class Wrapper(nn.Module):
    """What sharding and profiling put around a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


def forget_hooks(module):
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def fresh():
    return tiny.make("llama", seed=1).model


def set_layer(lm, index, layer):
    lm.model.layers[index] = layer


def set_layers(lm, layers):
    lm.model.layers = nn.ModuleList(layers)


# What is done to a host after adapters were put on layers 0 and 2.
LOST, KEPT = "raises", "arrives"
CHANGES = {
    "layers of another": (LOST, lambda lm: set_layers(lm, fresh().layers)),
    "layers copied": (LOST, lambda lm: set_layers(lm, map(copy.deepcopy, lm.model.layers))),
    "one layer of another": (LOST, lambda lm: set_layer(lm, 0, fresh().layers[0])),
    "the last layer of another": (LOST, lambda lm: set_layer(lm, 2, fresh().layers[2])),
    "body of another": (LOST, lambda lm: setattr(lm, "model", fresh())),
    "body copied": (LOST, lambda lm: setattr(lm, "model", copy.deepcopy(lm.model))),
    "a layer less": (LOST, lambda lm: lm.model.layers.__delitem__(2)),
    "a layer less by the config": (LOST, lambda lm: setattr(lm.config, "num_hidden_layers", 2)),
    "hooks removed": (LOST, lambda lm: forget_hooks(lm.model.layers[2])),
    "layers wrapped": (KEPT, lambda lm: set_layers(lm, map(Wrapper, lm.model.layers))),
    "one layer wrapped": (KEPT, lambda lm: set_layer(lm, 0, Wrapper(lm.model.layers[0]))),
    "body wrapped": (KEPT, lambda lm: setattr(lm, "model", Wrapper(lm.model))),
    "hooks of accelerate": (KEPT, lambda lm: [add_hook_to_module(layer, ModelHook()) for layer in lm.model.layers]),
    "one layer compiled": (KEPT, lambda lm: lm.model.layers[0].compile(backend="eager")),
    "layers in another list": (KEPT, lambda lm: set_layers(lm, list(lm.model.layers))),
}


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "compiled" in name else name for name in CHANGES]
)
@torch.no_grad()
def test_layers_of_a_language_model(name, position, ids):
    """Invariant 41."""
    outcome, change = CHANGES[name]
    lm, memory = tiny.make("llama"), tiny.memory(ROWS)
    model = tiny.attach(lm, position=position)
    want = model(ids, memory=memory).logits
    change(lm)
    text = {"max_new_tokens": 2, "do_sample": False}
    calls = [
        lambda: model(ids, memory=memory).logits[:, -1:],
        lambda: model.generate(ids, memory=memory, output_scores=True, return_dict_in_generate=True, **text).scores[0][
            :, None
        ],
    ]
    for call in calls:
        if outcome == KEPT:
            tiny.assert_close(call(), want[:, -1:], 1e-6)
            continue
        with pytest.raises(ConditionError, match=r"layers \[.*\].*unload"):
            call()
        with model.condition(memory), pytest.raises(ConditionError, match="unload"):
            lm(ids)
    # Without a memory it is whatever it became, and unloading leaves nothing.
    alone = lm(ids).logits
    assert model.unload() is lm
    assert torch.equal(lm(ids).logits, alone)


@torch.no_grad()
def test_what_is_not_an_adapters_layer_may_change(ids):
    """Other layers, embeddings and heads: the memory arrives, and the host is the new one."""
    lm, memory = tiny.make("llama"), tiny.memory(ROWS)
    model = tiny.attach(lm)
    for change in (
        lambda: set_layer(lm, 1, fresh().layers[1]),
        lambda: lm.resize_token_embeddings(tiny.VOCAB + 7, mean_resizing=False),
        lambda: setattr(lm, "lm_head", nn.Linear(32, 17, bias=False)),
    ):
        change()
        blind = lm(ids).logits
        assert differs(model(ids, memory=memory).logits, blind)
        with model.disable_adapter():
            assert torch.equal(lm(ids).logits, blind)


def test_layers_that_a_host_leaves_out_by_design(ids):
    """LayerDrop in training, and drafts of the first layers: nothing is wrong with them."""
    model = tiny.attach(tiny.make("opt", layerdrop=0.7)).train()
    torch.manual_seed(0)
    for _ in range(5):
        assert torch.isfinite(model(ids, memory=tiny.memory(ROWS)).logits).all()
    model, one, memory = tiny.attach(tiny.make("llama")), ids[:1], tiny.memory(1)
    text = {"max_new_tokens": 5, "do_sample": False}
    want = model.generate(one, memory=memory, **text)
    got = model.generate(one, memory=memory, assistant_early_exit=2, **text)
    assert torch.equal(got, want) and not torch.equal(got, model.generate(one, **text))


def attention_of_another(unet, name):
    return tiny_unets.make(seed=1).get_submodule(name)


def put(unet, name, module):
    parent, _, own = name.rpartition(".")
    setattr(unet.get_submodule(parent), own, module)


UNET_CHANGES = {
    "one attention of another": (LOST, lambda unet, name: put(unet, name, attention_of_another(unet, name))),
    "one attention copied": (LOST, lambda unet, name: put(unet, name, copy.deepcopy(unet.get_submodule(name)))),
    "the middle of another": (LOST, lambda unet, name: setattr(unet, "mid_block", tiny_unets.make(seed=1).mid_block)),
    "no middle": (LOST, lambda unet, name: setattr(unet, "mid_block", None)),
    "hooks removed": (LOST, lambda unet, name: unet.get_submodule(name)._forward_hooks.clear()),
    "the middle wrapped": (KEPT, lambda unet, name: setattr(unet, "mid_block", Wrapper(unet.mid_block))),
    "one attention wrapped": (KEPT, lambda unet, name: put(unet, name, Wrapper(unet.get_submodule(name)))),
    "fresh processors": (KEPT, lambda unet, name: unet.set_default_attn_processor()),
    "hooks of accelerate": (KEPT, lambda unet, name: add_hook_to_module(unet.get_submodule(name), ModelHook())),
}


@pytest.mark.parametrize("name", UNET_CHANGES)
@torch.no_grad()
def test_layers_of_a_unet(name):
    """Invariant 41."""
    outcome, change = UNET_CHANGES[name]
    unet, memory = tiny_unets.make(), tiny.memory(ROWS)
    model = tiny_unets.attach(unet)
    args, kwargs = tiny_unets.given()
    want = model(*args, memory=memory, **kwargs).sample
    change(unet, next(one for one in model.layer_names if one.startswith("mid")))
    if outcome == KEPT:
        tiny.assert_close(model(*args, memory=memory, **kwargs).sample, want)
    else:
        with pytest.raises(ConditionError, match="mid_block.*unload"):
            model(*args, memory=memory, **kwargs)
        with model.condition(memory), pytest.raises(ConditionError, match="mid_block.*unload"):
            unet(*args, **kwargs)
    alone = unet(*args, **kwargs).sample
    assert model.unload() is unet
    assert torch.equal(unet(*args, **kwargs).sample, alone)
