"""Forwards that begin above the lower layers: the whole host's answer bit for bit, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import mmattn
from mmattn.errors import ConditionError, ConfigError
from mmattn.training.lower_layers import lower_layers
from tests import tiny
from tests.families.building import tiny_model


class TestWhatIsBelow:
    def test_the_lowest_of_all_adapters_counts(self) -> None:
        model = tiny.attach(tiny.make("llama"), layers=(2,))
        assert lower_layers(model).count == 3
        tiny.attach(model.host, layers=(1,), position="before", name="second")
        assert lower_layers(model).count == 1
        model.delete_adapter("second")
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

    def test_a_lower_layer_that_runs_again_above(self) -> None:
        host = tiny.make("llama")
        model = tiny.attach(host, layers=(1,))
        layers = host.model.layers
        layers[2].register_forward_pre_hook(lambda layer, args: (layers[1](*args, position_embeddings=rotary(host)),))
        self.refused(model, "upper layers read more of the lower ones")

    def test_other_models(self) -> None:
        for model in (tiny.make("llama"), tiny.attach(tiny.make("llama")).host):
            with pytest.raises(ConfigError, match="give an adapted model, or a peft model"):
                lower_layers(model)


def rotary(host: Any) -> tuple[Tensor, Tensor]:
    """Of the probe's texts."""
    return host.model.rotary_emb(torch.zeros(2, 7, 32), torch.arange(7)[None])
