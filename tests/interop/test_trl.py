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


@pytest.mark.slow
def test_evaluation_and_rows_without_a_memory(tmp_path: Path) -> None:
    rows = tokenised.rows(6)
    for row in rows[::2]:
        row["memory"] = None
    model = tiny.attach(tiny.make("llama"))
    collator = training.MemoryCollator(DataCollatorForLanguageModeling(pad_token_id=0), memory_dim=tiny.MEMORY_DIM)
    made = trainer(tmp_path, model, tokenised.datasets.Dataset.from_list(rows), collator, max_steps=2)
    before = tokenised.weights(model)
    made.train()
    assert tokenised.unmoved(model, before) == []
    loss = made.evaluate(tokenised.dataset(4))["eval_loss"]
    batch = collator(tokenised.rows(4))
    with torch.no_grad():
        assert loss == pytest.approx(float(model.eval()(**batch).loss), rel=1e-4)


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


def test_the_base_model_is_the_host_without_its_head() -> None:
    model, ids, memory = tiny.attach(tiny.make("llama")), tiny.text(2), tiny.memory(2)
    with torch.no_grad():
        states = model.base_model(input_ids=ids, memory=memory).last_hidden_state
        assert torch.equal(model.host.lm_head(states), model(ids, memory=memory).logits)
        assert torch.equal(model.base_model(ids).last_hidden_state, model.host.model(ids).last_hidden_state)
    assert model.base_model.layers is model.host.model.layers
    with pytest.raises(ConditionError, match="adapter_scale= was given without memory="):
        model.base_model(ids, adapter_scale=0.5)
