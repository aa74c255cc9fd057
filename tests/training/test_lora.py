"""LoRA controls: as large as asked for, and what is trained is exactly what was asked for (Invariant 40)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import training
from mmattn.errors import ConfigError
from tests import tiny
from tests.training import small_run


class TestMatchedLora:
    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    @pytest.mark.parametrize("wanted", [701, 3001, 12007])
    def test_as_many_parameters(self, family: str, wanted: int) -> None:
        lm = tiny.make(family)
        ids = torch.tensor([[5, 6, 7]])
        before = lm(ids).logits
        model = training.matched_lora(lm, wanted)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert abs(trained - wanted) <= 0.05 * wanted
        assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-6)
        training.mean_nats(model, training.collate([[5, 6, 7]])).backward()
        assert any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        assert torch.equal(model.unload()(ids).logits, before)

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_in_some_layers(self, family: str) -> None:
        model = training.matched_lora(tiny.make(family), 3001, layers=[1, 2])
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {part for name in names for part in name.split(".") if part.isdigit()} == {"1", "2"}
        assert abs(sum(model.get_parameter(name).numel() for name in names) - 3001) <= 0.05 * 3001

    def test_in_layers_that_are_not_there(self) -> None:
        with pytest.raises(ConfigError, match=r"layers=\[1, 77\]: LlamaForCausalLM has no linear layers in \[77\]"):
            training.matched_lora(tiny.make("llama"), 3001, layers=[1, 77])

    def test_too_few(self) -> None:
        with pytest.raises(ConfigError, match="give the adapter more"):
            training.matched_lora(tiny.make("llama"), 3)

    def test_a_size_that_no_ranks_reach_changes_nothing(self) -> None:
        """Of two layers of 8 + 8 weights a rank, 24 parameters are as far from 16 as from 32."""
        host = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        names = [name for name, _ in host.named_modules()]
        with pytest.raises(ConfigError, match="the nearest LoRA has 16 parameters.* 24"):
            training.matched_lora(host, 24)
        assert [name for name, _ in host.named_modules()] == names
        assert all(parameter.requires_grad for parameter in host.parameters())


def test_a_layer_whose_name_ends_another_has_a_rank_of_its_own() -> None:
    """`proj` is as narrow as 3, `inner.proj` is not."""
    host = torch.nn.ModuleDict({"proj": torch.nn.Linear(3, 8), "inner": torch.nn.ModuleDict()})
    host["inner"]["proj"] = torch.nn.Linear(8, 8)
    model = training.add_lora(host, 5)
    ranks = {name: part.weight.shape[0] for name, part in model.named_modules() if "lora_A.default" in name}
    assert sorted(ranks.values()) == [3, 5] and ranks[next(name for name in ranks if "inner.proj" in name)] == 5


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class TestBesideAnAdapter:
    @pytest.mark.parametrize("order", ["LoRA first", "adapter first"])
    def test_both_are_trained_and_nothing_else(self, tmp_path: Path, order: str) -> None:
        """Invariant 40, peft before and after attach."""
        if order == "LoRA first":
            model = tiny.attach(training.add_lora(tiny.make("llama"), 2), opened=False)
        else:
            model = tiny.attach(tiny.make("llama"), opened=False)
            training.add_lora(model.host, 2)
        before = trained(model)
        assert {("lora_" in name, name.startswith("adapters.")) for name in before} == {(True, False), (False, True)}
        adapter = {f"adapters.{name}" for name, _ in model.adapters.named_parameters()}
        assert {name for name in before if name.startswith("adapters.")} == adapter
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        small_run.run(tmp_path, model=model, max_steps=3)
        after = dict(model.named_parameters())
        assert all(not torch.equal(after[name], value) for name, value in before.items())
        assert all(torch.equal(after[name], value) for name, value in frozen.items())
        assert set(trained(model)) == set(before)

    def test_the_control_of_an_attached_host_is_as_large_as_asked(self) -> None:
        model = tiny.attach(tiny.make("llama"))
        adapter = set(trained(model))
        lora = training.matched_lora(model.host, 3001)
        assert sum(value.numel() for value in trained(lora).values()) == pytest.approx(3001, rel=0.05)
        assert {name for name in trained(model) if "lora_" not in name} == adapter
        lora.unload()
        assert set(trained(model)) == adapter

    def test_not_on_the_adapters(self) -> None:
        model = tiny.attach(tiny.make("llama"))
        before = set(trained(model))
        for call in (lambda: training.add_lora(model, 2), lambda: training.matched_lora(model, 3001)):
            with pytest.raises(ConfigError, match=r"has adapters, which peft would freeze.*give its \.host"):
                call()
        assert set(trained(model)) == before

    def test_not_on_another_lora(self) -> None:
        lora = training.add_lora(tiny.make("llama"), 2)
        before = set(trained(lora))
        for call in (lambda: training.add_lora(lora, 2), lambda: training.matched_lora(lora, 3001)):
            with pytest.raises(ConfigError, match=r"has a LoRA already.*unload\(\)"):
                call()
        assert set(trained(lora)) == before
        assert training.matched_lora(lora.unload(), 3001)
