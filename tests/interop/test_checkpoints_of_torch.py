"""`torch.distributed.checkpoint` reads and sets the state of an adapted model, as FSDP2 and Lightning do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from transformers import AutoModel, AutoModelForSeq2SeqLM

import mmattn
from mmattn import training
from tests import tiny, tiny_transformers, tiny_unets
from tests.families.building import tiny_model

HOSTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "language model": (lambda: tiny.make("llama"), mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1)),
    "joined": (lambda: tiny.make("llama"), mmattn.adapters.JoinedAdapter(tiny.MEMORY_DIM, every=1)),
    "prefix": (lambda: tiny.make("llama"), mmattn.adapters.PrefixAdapter(3)),
    "LoRA": (lambda: training.add_lora(tiny.make("llama"), 2), mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1)),
    "encoder": (
        lambda: tiny_model("bert", AutoModel),
        mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1),
    ),
    "encoder and decoder": (
        lambda: tiny_model("t5", AutoModelForSeq2SeqLM),
        mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1),
    ),
    "UNet": (tiny_unets.make, mmattn.DecoupledAdapter(tiny.MEMORY_DIM)),
    "transformer": (tiny_transformers.make, mmattn.DecoupledAdapter(tiny.MEMORY_DIM)),
}


def adapted(name: str, seed: int) -> Any:
    """A host with two adapters of this kind, their values random."""
    make, adapter = HOSTS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = mmattn.attach(make(), adapter)
        model.add_adapter("second", adapter)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in trained(model).values():
                parameter.normal_(0, 0.3)
    return model


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a module"])
@pytest.mark.parametrize("name", list(HOSTS))
def test_the_state_of_one_is_set_on_another(name: str, nested: bool) -> None:
    """Invariant 158: of model and optimizer, with the names that they have."""
    models, optimizers = [adapted(name, seed) for seed in (0, 1)], []
    for model in models:
        optimizers.append(torch.optim.AdamW(trained(model).values(), lr=0.1))
        for parameter in trained(model).values():
            parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    roots = [nn.ModuleDict({"net": model}) if nested else model for model in models]
    state = copy.deepcopy(dcp.get_model_state_dict(roots[0]))
    assert {key for key in state if not key.endswith("adapter_config")} == set(trained(roots[0]))
    assert not any(dcp.set_model_state_dict(roots[1], state))
    values = copy.deepcopy(dcp.get_optimizer_state_dict(roots[0], optimizers[0]))
    dcp.set_optimizer_state_dict(roots[1], optimizers[1], values)
    for optimizer in optimizers:
        optimizer.step()
    assert trained(models[0])
    for key, value in trained(models[0]).items():
        assert torch.equal(value, trained(models[1])[key]), key
