"""TRL's `SFTTrainer` trains the adapter with its memory, as our loop does, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from mmattn import training
from mmattn.errors import AttachError, ConditionError
from tests import tiny
from tests.interop import tokenised

trl = pytest.importorskip("trl", reason="TRL is installed with the dependency group dev")

from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: E402

pytestmark = [
    # TRL 1.16 and peft 0.21 ask transformers 5.23 by old names.
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def trainer(folder: Path, model: Any, dataset: Any = None, data_collator: Any = "memory", **changes: Any) -> Any:
    own = {"output_dir": str(folder), "per_device_train_batch_size": 11, "bf16": False, "remove_unused_columns": False}
    if data_collator == "memory":
        data_collator = training.MemoryCollator(DataCollatorForLanguageModeling(pad_token_id=0))
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**(tokenised.ARGUMENTS | own | changes)),
        train_dataset=tokenised.dataset() if dataset is None else dataset,
        processing_class=tokenised.make_tokenizer(),
        data_collator=data_collator,
    )


@pytest.mark.parametrize("unused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_memory_that_trl_drops_is_missed(unused: bool, tmp_path: Path) -> None:
    """With its own collator, it would train three steps and change nothing; given around the training it is seen."""
    model = tiny.attach(tiny.make("llama"))
    before = tokenised.weights(model)
    made = trainer(tmp_path, model, data_collator=None, remove_unused_columns=unused)
    with pytest.raises(ConditionError, match=r"without a memory.*MemoryCollator"):
        made.train()
    with model.condition(tiny.memory(11)):
        made.train()
    assert tokenised.unmoved(model, before) == []


def test_a_lora_beside_the_adapter(tmp_path: Path) -> None:
    """Put on the host by peft; TRL's own `peft_config` would put it on the adapter, and is refused."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = tiny.attach(peft.get_peft_model(tiny.make("llama"), config))
    own = {name: value.detach().clone() for name, value in model.host.named_parameters()}
    before = tokenised.weights(model)
    trainer(tmp_path, model).train()
    assert tokenised.unmoved(model, before) == []
    moved = {name for name, value in model.host.named_parameters() if not torch.equal(value, own[name])}
    assert moved == {name for name in own if "lora_" in name}
    with pytest.raises(AttachError, match=r"get_peft_model\(model\.host"):
        trl.SFTTrainer(
            model=tiny.attach(tiny.make("llama")),
            args=trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
            train_dataset=tokenised.dataset(),
            processing_class=tokenised.make_tokenizer(),
            peft_config=config,
        )


def test_prompts_of_peft_are_refused() -> None:
    host = peft.get_peft_model(tiny.make("llama"), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    model = tiny.attach(host)
    with pytest.raises(ConditionError, match="leave the prompts out"):
        model.base_model(tiny.text(2), memory=tiny.memory(2))
