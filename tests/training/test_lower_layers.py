"""Forwards that begin above the lower layers: the whole host's answer bit for bit, or refused in words."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import mmattn
from mmattn.errors import ConditionError, ConfigError
from mmattn.hosts.causal_lm.lower_layers import LowerLayers, lower_layers
from tests import tiny
from tests.families.building import tiny_model

LENGTHS = (11, 7, 5)
families = pytest.mark.parametrize("family", tiny.FAMILIES)


def texts() -> tuple[Tensor, Tensor]:
    """Ids and attention mask (3, 11), padded on the right."""
    mask = (torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]).long()
    return tiny.text(3, LENGTHS[0]) * mask, mask


def learned(model: Any, **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of the texts, and the gradients of their sum by what is trained."""
    ids, mask = texts()
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **given).logits
    (logits * mask[..., None]).sum().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert found
    return logits.detach(), found


def states_below(model: Any, lower: LowerLayers) -> Tensor:
    """What the last of the lower layers hands on for the texts, together in one batch."""
    caught: list[Any] = []
    layer = model.layers[lower.count - 1]
    hook = layer.register_forward_hook(lambda layer, args, output: caught.append(output), prepend=True)
    ids, mask = texts()
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    hook.remove()
    return caught[0][0] if isinstance(caught[0], tuple) else caught[0]


@families
@pytest.mark.parametrize(("position", "count"), [("after", 2), ("before", 1)])
def test_answers_and_gradients_are_the_hosts_bit_for_bit(family: str, position: str, count: int) -> None:
    """In training mode, with padding, from the states that the whole host has; the lower layers do not run."""
    model = tiny.attach(tiny.make(family), layers=(1, 2), position=position)
    model.train()
    lower, memory = lower_layers(model), tiny.memory(3, lengths=[5, 0, 3])
    assert lower.count == count
    want, want_gradients = learned(model, memory=memory)
    states, ran = states_below(model, lower), []
    attentions = [part for part in model.layers[0].modules() if part is not model.layers[0]]
    hooks = [part.register_forward_hook(lambda *_: ran.append(1)) for part in attentions]
    with lower.installed():
        lower.skip(states)
        got, gradients = learned(model, memory=memory)
        lower.run()
    assert not ran, "a part of a lower layer was run"
    assert torch.equal(got, want) and gradients.keys() == want_gradients.keys()
    assert all(torch.equal(gradients[name], value) for name, value in want_gradients.items())
    learned(model, memory=memory)
    assert ran, "outside of the block all layers run"
    for hook in hooks:
        hook.remove()
    assert not any("forward" in layer.__dict__ for layer in model.layers)


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_texts_computed_together_and_alone(family: str) -> None:
    """Equal but for rounding; their own states alone, whatever memory and whatever mode there is."""
    model = tiny.attach(tiny.make(family), layers=(1,))
    model.train()
    lower, (ids, mask) = lower_layers(model), texts()
    want = states_below(model, lower)
    with lower.installed(), model.condition(tiny.memory(3)):
        together = lower.compute([row[: int(own.sum())] for row, own in zip(ids, mask, strict=True)])
        alone = [lower.compute([ids[row, :length]])[0] for row, length in enumerate(LENGTHS)]
    assert model.training and model.layers[0].training
    for row, length in enumerate(LENGTHS):
        assert together[row].shape == alone[row].shape == (length, 32)
        tiny.assert_close(together[row], want[row, :length], 1e-5)
        tiny.assert_close(alone[row], want[row, :length], 1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_gradient_checkpointing_of_the_host(use_reentrant: bool) -> None:
    model = tiny.attach(tiny.make("llama"), layers=(1, 2))
    model.train()
    lower, memory = lower_layers(model), tiny.memory(3)
    want, want_gradients = learned(model, memory=memory)
    states = states_below(model, lower)
    tiny.checkpoint(model.host, use_reentrant)
    with lower.installed():
        lower.skip(states)
        got, gradients = learned(model, memory=memory)
        lower.run()
    assert torch.equal(got, want)
    assert all(torch.equal(gradients[name], value) for name, value in want_gradients.items())


class TestWhatIsBelow:
    def test_the_lowest_of_all_adapters_counts(self) -> None:
        model = tiny.attach(tiny.make("llama"), layers=(2,))
        assert lower_layers(model).count == 3
        tiny.attach(model.host, layers=(1,), position="before", name="second")
        assert lower_layers(model).count == 1
        model.delete_adapter("second")
        assert lower_layers(model).count == 3

    # peft 0.21 asks transformers 5.23 by the old name.
    @pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
    def test_a_lora_in_upper_layers(self) -> None:
        """It is trained, and what lies below it too; a frozen one in the lower layers is a part of them."""
        settings = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1, 2])
        host = peft.get_peft_model(tiny.make("llama"), settings)
        model = tiny.attach(host, layers=(2,))
        assert lower_layers(model).count == 1
        host.requires_grad_(False)
        assert lower_layers(model).count == 3

    @pytest.mark.parametrize("layers", [(0,), (0, 2)])
    def test_nothing(self, layers: tuple[int, ...]) -> None:
        model = tiny.attach(tiny.make("llama"), layers=layers, position="before")
        with pytest.raises(ConditionError, match=r"no layer of LlamaForCausalLM is below .* such as layers=\(1, 2\)"):
            lower_layers(model)

    def test_before_the_text(self) -> None:
        model = mmattn.attach(tiny.make("llama"), mmattn.adapters.InsertedAdapter(memory_dim=tiny.MEMORY_DIM))
        with pytest.raises(ConditionError, match="an adapter acts at its first layer or before the text"):
            lower_layers(model)


class TestRefused:
    def refused(self, model: Any, match: str) -> None:
        before = dict(model.layers[0].__dict__)
        with pytest.raises(ConditionError, match=match):
            lower_layers(model)
        assert before == model.layers[0].__dict__, "a refusal leaves nothing behind"

    def test_trained_embeddings(self) -> None:
        model = tiny.attach(tiny.make("llama"), layers=(2,))
        model.get_input_embeddings().weight.requires_grad_(True)
        self.refused(model, "a parameter below layer 3 of LlamaForCausalLM is trained")

    def test_a_layer_that_reads_an_earlier_one(self) -> None:
        """As keys and values that layers share: the states of another text must not do in their place."""
        host = tiny.make("llama")
        kept: dict[str, Tensor] = {}
        host.model.layers[0].register_forward_hook(lambda layer, args, output: kept.update(first=output * 0.5))
        layer = host.model.layers[2]
        layer.forward = lambda x, **kwargs: type(layer).forward(layer, x + kept["first"], **kwargs)
        self.refused(tiny.attach(host, layers=(1,)), "upper layers read more of the lower ones")

    @pytest.mark.parametrize("family", ["zaya", "gemma3n_text", "deepseek_v4", "openai-gpt"])
    def test_families(self, family: str) -> None:
        """Routers that read earlier routers, several residual streams, lists in place of tuples."""
        try:
            host = tiny_model(family, AutoModelForCausalLM)
        except (KeyError, ValueError):
            pytest.skip(f"this transformers has no {family}")
        settings = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(3,), num_heads=2, position="before")
        self.refused(mmattn.attach(host, settings), "cannot be cached")

    def test_layers_in_another_order(self) -> None:
        host = tiny.make("llama")
        model = tiny.attach(host, layers=(2,))
        layers = host.model.layers
        layers[2].register_forward_pre_hook(lambda layer, args: (layers[1](*args, position_embeddings=rotary(host)),))
        self.refused(model, "are not run once each, one after the other")

    def test_other_models(self) -> None:
        for model in (tiny.make("llama"), tiny.attach(tiny.make("llama")).host):
            with pytest.raises(ConfigError, match="what mmattn.attach returned"):
                lower_layers(model)


def rotary(host: Any) -> tuple[Tensor, Tensor]:
    """Of the probe's texts."""
    return host.model.rotary_emb(torch.zeros(2, 7, 32), torch.arange(7)[None])
