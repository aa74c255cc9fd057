"""Gated blocks that know the mean and spread of the hidden states that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import training
from mmattn.adapters.gated.block import Calibration
from mmattn.errors import ConditionError
from tests import tiny

ROWS, LENGTH, LAYERS = 5, 7, (0, 1)


def adapted(family: str = "llama", **settings: Any) -> Any:
    return mmattn.attach(tiny.make(family), mmattn.GatedAdapter(tiny.MEMORY_DIM, layers=LAYERS, **settings))


def inputs() -> dict[str, torch.Tensor]:
    """Texts of unequal length, padded on the left."""
    mask = (torch.arange(LENGTH) >= torch.tensor([0, 2, 0, 3, 1])[:, None]).long()
    return {"input_ids": tiny.text(ROWS, LENGTH), "attention_mask": mask}


def calibration(model: Any, layer: int) -> Any:
    return model.adapter("default").block(layer).calibration


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_mean_and_spread_are_those_of_tokens_that_attend(family: str) -> None:
    """Padding, and tokens that attend to no slot, are not among them; a fresh adapter is still nothing."""
    model, batch, memory = adapted(family), inputs(), tiny.memory(ROWS, lengths=[5, 3, 0, 1, 5])
    bare = model(**batch, output_hidden_states=True)
    arrived = torch.full((ROWS, LENGTH), memory.length)
    arrived[:, :4] = 0
    model.calibrate(**batch, memory=memory, arrived=arrived)
    attending = batch["attention_mask"].bool() & (arrived > 0)
    attending[2] = False
    for layer in LAYERS:
        states = bare.hidden_states[layer + 1][attending]
        torch.testing.assert_close(calibration(model, layer).mean, states.mean(0))
        torch.testing.assert_close(calibration(model, layer).spread, states.std(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(model(**batch, memory=memory).logits, bare.logits)


def test_what_a_block_reads_is_standardised() -> None:
    """Of hidden states that are the same for all tokens but for little, that little; constants stay finite."""
    x = 30 + torch.randn(1009, 13) * torch.linspace(0, 5, 13)
    read = Calibration(13)
    read.measure(x)
    out = read(x)
    assert torch.isfinite(out).all() and float(out.mean(0).abs().max()) < 1e-2
    torch.testing.assert_close(out.std(0)[2:], torch.ones(11), rtol=1e-3, atol=1e-3)


def test_it_is_saved_and_trained_with(tmp_path: Path) -> None:
    model, batch, memory = adapted(), inputs(), tiny.memory(ROWS)
    plain = tiny.open_gates(adapted())(**batch, memory=memory).logits
    model.calibrate(**batch, memory=memory)
    written = tiny.open_gates(model)(**batch, memory=memory).logits
    assert tiny.differs(written, plain)
    model.save_adapter(tmp_path)
    again = mmattn.load(tiny.make("llama"), tmp_path)
    assert torch.equal(again(**batch, memory=memory).logits, written)
    with pytest.raises(ConditionError, match="no attached adapter has its gates at 0"):
        again.calibrate(**batch, memory=memory)


def test_a_state_dict_brings_it() -> None:
    """Into a fresh adapter, as trainers resume; what is saved of that again is calibrated, too."""
    model, batch, memory = adapted(), inputs(), tiny.memory(ROWS)
    model.calibrate(**batch, memory=memory)
    written = tiny.open_gates(model)(**batch, memory=memory).logits
    again = adapted()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(**batch, memory=memory).logits, written)
    assert again.adapter("default").config == model.adapter("default").config


def test_dropout_does_not_act_meanwhile() -> None:
    """And the model is in training afterwards, as before."""
    batch, memory = inputs(), tiny.memory(ROWS)
    hosts = [tiny.make("gpt2", resid_pdrop=0.5) for _ in range(2)]
    still, training_mode = (mmattn.attach(host, mmattn.GatedAdapter(tiny.MEMORY_DIM, layers=LAYERS)) for host in hosts)
    for model in (still, training_mode.train()):
        model.calibrate(**batch, memory=memory)
    assert torch.equal(calibration(still, 1).mean, calibration(training_mode, 1).mean)
    assert training_mode.training and training_mode.host.training


def test_one_token_has_no_spread() -> None:
    model, memory = adapted(), tiny.memory(1)
    arrived = torch.tensor([[0, 0, memory.length]])
    with pytest.raises(ConditionError, match="fewer than two tokens attended"):
        model.calibrate(tiny.text(1, 3), memory=memory, arrived=arrived)
    assert calibration(model, 0) is None


@pytest.mark.parametrize("calibrate", [True, False])
def test_training_calibrates_by_its_first_batch(tmp_path: Path, calibrate: bool) -> None:
    memory, ids = tiny.memory(ROWS), tiny.text(ROWS, LENGTH)

    def collate(rows: list[int]) -> dict[str, object]:
        return {"input_ids": ids[rows], "labels": ids[rows], "memory": memory[rows]}

    model = adapted()
    settings = training.OptimSettings(max_steps=2, per_device_train_batch_size=3)
    arguments = settings.arguments(
        training.RunSettings(out=str(tmp_path), device="cpu"), train_sampling_strategy="sequential"
    )
    trainer = training.AdapterTrainer(
        model, arguments, data_collator=collate, train_dataset=range(5), calibrate=calibrate
    )
    trainer.train()
    if not calibrate:
        assert calibration(model, 0) is None
        return
    want = adapted()
    want.calibrate(ids[:3], memory=memory[:3])
    for layer in LAYERS:
        torch.testing.assert_close(calibration(model, layer).mean, calibration(want, layer).mean)


def layer_output(model: Any, layer: int, **call: Any) -> torch.Tensor:
    """The hidden states after a layer and its adapters."""
    seen: list[torch.Tensor] = []
    with model.layers[layer].register_forward_hook(lambda module, args, output: seen.append(output)):
        model(**inputs(), **call)
    assert torch.isfinite(seen[0]).all()
    return seen[0]


@pytest.mark.parametrize("calibrated", [False, True])
@torch.no_grad()
def test_the_scale_multiplies_all_that_a_block_adds(calibrated: bool) -> None:
    """Invariant 187: attention and feed-forward."""
    model, memory = adapted(), tiny.memory(ROWS)
    if calibrated:
        model.calibrate(**inputs(), memory=memory)
    tiny.open_gates(model)
    none, half, whole = (layer_output(model, 0, **call) for call in (
        {}, {"memory": memory, "adapter_scale": 0.5}, {"memory": memory},
    ))  # fmt: skip
    assert tiny.differs(whole, none)
    tiny.assert_close(half - none, 0.5 * (whole - none).double())


@torch.no_grad()
def test_the_feed_forward_reads_calibrated_states() -> None:
    """Invariant 187: where the attention adds nothing, that is all that a block adds."""
    model, memory = adapted(), tiny.memory(ROWS)
    model.calibrate(**inputs(), memory=memory)
    block = tiny.open_gates(model).adapter("default").block(0)
    block.gate.gate.zero_()
    bare, found = layer_output(model, 0), layer_output(model, 0, memory=memory)
    wanted = bare + torch.tanh(block.feed_forward_gate.gate) * block.feed_forward(
        (bare - block.calibration.mean) / block.calibration.spread
    )
    assert tiny.differs(found, bare)
    tiny.assert_close(found, wanted.double())
