"""The speed that metrics name: tokens a second, and the share of what a known card can do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmattn import training
from mmattn.training import metrics
from mmattn.training.metrics import flops_per_token
from tests import tiny
from tests.training import small_run


@pytest.mark.parametrize("layers", [(0,), (1, 2), (2,)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_operations_of_a_step(family: str, layers: tuple[int, ...]) -> None:
    """Invariant 217: those that torch counts, scores of attention aside; heads are tied or not."""
    model, ids = tiny.attach(tiny.make(family), layers=layers).train(), tiny.text(3, 5)
    with FlopCounterMode(display=False) as counted:
        model(ids, labels=ids, memory=tiny.memory(3, m=5)).loss.backward()
    operations = counted.get_flop_counts()["Global"]
    scores = sum(count for name, count in operations.items() if "attention" in str(name) or "bmm" in str(name))
    assert counted.get_total_flops() - scores == pytest.approx(15 * flops_per_token(model), rel=0.05)


def test_where_weights_are_no_measure_of_operations() -> None:
    """Invariant 217: a token passes few experts; a plain module is no language model."""
    assert flops_per_token(tiny.attach(tiny.make("mixtral"))) == 0
    assert flops_per_token(nn.Linear(3, 5)) == 0


@pytest.fixture(params=[None, 7e9], ids=["unknown", "known"])
def peak(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float | None:
    """What the device is said to do in a second."""
    if request.param is not None:
        monkeypatch.setattr(metrics, "peak_flops", lambda device: request.param)
    return request.param


def test_figures_of_the_trainer(tmp_path: Path, peak: float | None) -> None:
    """Invariant 217: every line with a loss has them, whatever else is evaluated and saved."""
    model = small_run.attach()
    arguments = small_run.arguments(
        tmp_path, max_steps=5, per_device_train_batch_size=3, logging_steps=2, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer = training.AdapterTrainer(
        model=model, args=arguments, data_collator=small_run.collator(),
        train_dataset=small_run.rows(), eval_dataset=small_run.rows(5),
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["tokens_per_second"] > 0
        if peak is None:
            assert "mfu" not in line
        else:
            share = line["tokens_per_second"] * flops_per_token(model) / peak
            assert line["mfu"] == pytest.approx(share, rel=1e-3, abs=6e-5)  # of four digits


def test_a_known_card() -> None:
    """By the whole name: a part of a card, or one for laptops, does less."""
    assert metrics.PEAKS["NVIDIA H200"] == metrics.PEAKS["NVIDIA H100 80GB HBM3"] == 989e12
    assert "NVIDIA H100 80GB HBM3 MIG 1g.10gb" not in metrics.PEAKS
    assert metrics.peak_flops(torch.device("cpu")) is None
