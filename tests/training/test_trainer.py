"""The Trainer for hosts with adapters: it trains with memory, keeps only what is trained, and can be taken up again."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import training
from mmattn.errors import ConfigError
from mmattn.training.trainer import last_complete
from tests import tiny
from tests.training import small_run


def trainer(folder: Path, model: Any = None, **arguments: Any) -> Any:
    given = {
        "max_steps": 6, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "seed": 3,
    } | arguments  # fmt: skip
    return training.AdapterTrainer(
        model=small_run.attach(dropout=0.2) if model is None else model,
        args=small_run.arguments(folder, **given),
        data_collator=small_run.collator(),
        train_dataset=small_run.rows(),
        eval_dataset=small_run.rows(5),
        gate_learning_rate=0.1,
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.adapters.named_parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run that nothing interrupts, and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    made = trainer(folder)
    before = weights(made.model)
    made.train()
    after = weights(made.model)
    assert all(not torch.equal(value, before[name]) for name, value in after.items() if name.endswith("gate"))
    return folder, after


def test_a_checkpoint_holds_what_is_trained_and_no_host(whole: tuple[Path, Any]) -> None:
    folder, after = whole
    last = folder / "checkpoint-6"
    names = {path.name for path in last.iterdir()}
    assert names == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth",
        "scheduler.pt", "trained.safetensors", "trainer_state.json",
    }  # fmt: skip
    tensors, _ = mmattn.training.trainer.read_tensors(last / "trained.safetensors", "mmattn-trained")
    assert set(tensors) == {f"adapters.{name}" for name in after}
    model = mmattn.load(tiny.make("llama"), last)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())
    biggest = max(path.stat().st_size for path in last.rglob("*") if path.is_file())
    assert biggest < 4 * sum(value.numel() * 4 for value in after.values())


def test_taken_up_it_ends_bit_for_bit_the_same(whole: tuple[Path, Any], tmp_path: Path) -> None:
    folder, after = whole
    for step in (2, 4):
        shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    # As a kill in the middle of a save leaves it.
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    made = trainer(tmp_path)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6
    assert all(torch.equal(value, after[name]) for name, value in weights(made.model).items())


def test_memory_arrives(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    rows = [row for row in small_run.rows() if row.has_memory][:3]
    tiny.open_gates(made.model)
    seen, blind = made.evaluate(rows)["eval_loss"], made.evaluate([training.Row(row.text) for row in rows])["eval_loss"]
    assert abs(seen - blind) > 1e-3
    (batch,) = made.get_eval_dataloader(rows)
    assert float(made.model.eval()(**batch).loss.detach()) == pytest.approx(seen, rel=1e-4)


def test_gates_have_their_rate_and_the_cache_its_setting(tmp_path: Path) -> None:
    model = small_run.attach()
    model.host.config.use_cache = True
    made = trainer(tmp_path, model, max_steps=1, save_strategy="no")
    model.host.config.use_cache = True
    made.train()
    assert model.host.config.use_cache is True
    rates = {group["initial_lr"] for group in made.optimizer.param_groups}
    assert rates == {1e-2, 0.1}
    state = tiny.make("llama").state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.host.state_dict().items())


def test_batches_that_one_process_makes_for_all_are_refused(tmp_path: Path) -> None:
    """Invariant 157."""
    with pytest.raises(ConfigError, match="dispatch_batches=True sends slices of tensors"):
        trainer(tmp_path, accelerator_config={"dispatch_batches": True})
    assert trainer(tmp_path).args.accelerator_config.dispatch_batches is False


def test_the_last_checkpoint_is_that_of_the_last_step(tmp_path: Path) -> None:
    """Invariant 195: by number, not by name, and the last that is complete."""
    made = trainer(tmp_path, max_steps=11, save_steps=1, gradient_accumulation_steps=1, eval_strategy="no")
    made.train()
    assert last_complete(tmp_path) == str(tmp_path / "checkpoint-11")
    (tmp_path / "checkpoint-11" / "trainer_state.json").unlink()
    shutil.rmtree(tmp_path / "checkpoint-10")
    assert last_complete(tmp_path) == str(tmp_path / "checkpoint-9")


def test_the_best_weights_are_there_at_the_end(tmp_path: Path) -> None:
    """Invariant 195: `load_best_model_at_end`."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    made = trainer(tmp_path, eval_strategy="steps", eval_steps=2, **best)  # the worst loss: not that of the last step
    made.train()
    chosen = Path(made.state.best_model_checkpoint)
    assert chosen.name != "checkpoint-6"
    kept, _ = mmattn.training.trainer.read_tensors(chosen / "trained.safetensors", "mmattn-trained")
    assert all(torch.equal(value, kept[f"adapters.{name}"]) for name, value in weights(made.model).items())


def test_a_run_whose_batches_have_no_memory_warns_and_names_their_columns(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=2, save_strategy="no", gradient_accumulation_steps=1)
    made.train_dataset = [replace(row, memory=None) for row in small_run.rows()]
    with pytest.warns(UserWarning, match="every gradient was 0.*input_ids.*labels"):
        made.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer(tmp_path, max_steps=2, save_strategy="no").train()
