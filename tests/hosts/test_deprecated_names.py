"""Nothing of mmattn uses a name that transformers calls deprecated: it would warn users of what they did not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import mmattn
from mmattn import training
from mmattn.testing import Case
from mmattn.testing.adapter_calls import check_generation
from mmattn.testing.adapter_life import check_gradients_reach_the_adapter
from tests import tiny

IDS = torch.tensor([[5, 9, 3, 7, 11], [4, 6, 8, 2, 13]])
GATED = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM)
pytestmark = pytest.mark.usefixtures("nothing_deprecated")


def with_lora() -> nn.Module:
    host: nn.Module = peft.get_peft_model(tiny.make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    return host.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("make", [with_lora, lambda: tiny.make("mamba")], ids=["LoRA", "mamba"])
def test_hosts_that_the_contract_does_not_have(make: Any) -> None:
    """Invariant 177: training and writing with a memory, and going on from a cache."""
    case = Case(GATED, make)
    check_gradients_reach_the_adapter(case)
    check_generation(case)


def test_a_step_of_the_trainer(tmp_path: Path) -> None:
    """Invariant 177: one that computes activations again."""
    row = {"input_ids": IDS[0], "labels": IDS[0], "memory": tiny.memory(2, 3).tokens[0]}
    arguments: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 1, "report_to": "none", "use_cpu": True}
    arguments |= {"dataloader_pin_memory": False, "disable_tqdm": True, "logging_steps": 10}
    arguments["activation_checkpointing" if tiny.IS_5_24 else "gradient_checkpointing"] = True
    training.AdapterTrainer(
        model=mmattn.attach(tiny.make("llama"), GATED),
        args=transformers.TrainingArguments(**arguments),
        data_collator=training.MemoryCollator(transformers.DefaultDataCollator()),
        train_dataset=[row] * 2,
    ).train()


def test_prompts_that_were_computed_before() -> None:
    """Invariant 177: and hidden states of lower layers."""
    model = mmattn.attach(tiny.make("llama"), mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(2,)))
    with training.cached_prompts(model, [row[:3].tolist() for row in IDS]) as prompts:
        model(**prompts[[0, 1]], memory=tiny.memory(2, 3))
