"""The loop: killed and taken up again it ends bit for bit the same, and how a batch is cut changes nothing."""

from __future__ import annotations

import json
import math
import signal
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import training
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError
from tests import tiny
from tests.tiny import assert_close
from tests.training import small_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    small_run.run(folder)
    return folder


def kept(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """What the checkpoint of a step holds."""
    return training.checkpoints.load_checkpoint(folder / "checkpoints" / f"step-{step:08d}")[0]


def weights(model: object) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.adapters.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_killed_and_taken_up_it_ends_bit_for_bit_the_same(whole: Path, tmp_path: Path) -> None:
    """Invariant 76: killed inside an accumulation, and in the middle of writing a checkpoint."""
    found = small_run.start(tmp_path, kill={"at_loss": 10})  # the second piece of step 5; a checkpoint is at step 4
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert training.last_step(tmp_path / "checkpoints") == 4
    found = small_run.start(tmp_path, kill={"at_save": 2})  # steps 5 to 8, of which 8 is half written
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert training.last_step(tmp_path / "checkpoints") == 6
    done, _ = small_run.run(tmp_path)
    assert (done.resumed_from_step, done.global_step) == (6, 9)
    assert small_run.sha256(tmp_path) == small_run.sha256(whole)
    assert small_run.losses(tmp_path) == small_run.losses(whole) and len(small_run.losses(whole)) == 9
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000008", "step-00000009"], "two are kept, and nothing half written"


def test_a_finished_run_started_again_changes_nothing(whole: Path) -> None:
    before = small_run.sha256(whole)
    done, _ = small_run.run(whole)
    assert done.resumed_from_step == done.global_step == 9 and small_run.sha256(whole) == before


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """The same global batches; some of them leave one process, or both, without anything to remember."""
    plain = {"dropout": 0.0, "max_steps": 5, "batch_size": 3, "gradient_accumulation_steps": 1}
    one, two = tmp_path / "one", tmp_path / "two"
    small_run.run(one, **plain)
    found = small_run.start(two, processes=2, **plain)
    assert found.returncode == 0, found.stderr
    order = training.RowBatches(small_run.rows(), 3, seed=3).epoch(0)
    shares = [[any(row.has_memory for row in batch[rank::2]) for rank in (0, 1)] for batch in islice(order, 5)]
    assert [True, False] in shares or [False, True] in shares
    first, second = small_run.losses(one), small_run.losses(two)
    assert second == pytest.approx(first, rel=1e-5) and len(second) == 5
    here, there = kept(one, 5), kept(two, 5)
    assert set(here) == set(there)
    for name, value in here.items():
        assert_close(there[name], value, 1e-2)


@pytest.mark.slow
def test_a_run_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    """The same order of the data, and losses equal to rounding: one process, then two, then one again."""
    plain: dict[str, Any] = {"dropout": 0.0, "lr_scheduler_type": "constant", "eval_steps": 0, "ema_decay": 0.0}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small_run.run(whole, **plain)
    found = small_run.start(parts, kill={"at_loss": 7}, **plain)  # in step 4; a checkpoint is at step 2
    assert found.returncode == -signal.SIGKILL, found.stderr
    found = small_run.start(parts, processes=2, kill={"at_loss": 9, "rank": 1}, **plain)  # in step 7; one at step 6
    assert found.returncode != 0 and training.last_step(parts / "checkpoints") == 6
    done, _ = small_run.run(parts, **plain)
    assert done.resumed_from_step == 6 and done.global_step == 9
    assert small_run.losses(parts) == pytest.approx(small_run.losses(whole), rel=1e-4)


@pytest.mark.slow
def test_one_of_two_processes_is_killed_and_torchrun_starts_them_again(tmp_path: Path) -> None:
    """With `--max-restarts` the run goes on from its last checkpoint, however far apart they begin."""
    plain: dict[str, Any] = {"dropout": 0.0, "eval_steps": 0, "ema_decay": 0.0}
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert small_run.start(whole, processes=2, **plain).returncode == 0
    kill = {"at_loss": 9, "rank": 1}  # in step 5
    found = small_run.start(again, processes=2, restarts=1, kill=kill, apart=10, **plain)
    assert found.returncode == 0, found.stderr
    assert "-9" in found.stderr or "SIGKILL" in found.stderr or "Signal 9" in found.stderr
    assert small_run.sha256(again) == small_run.sha256(whole)
    assert small_run.losses(again) == small_run.losses(whole) and len(small_run.losses(whole)) == 9


@pytest.mark.parametrize(
    "changes",
    [{"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 3}, {"gradient_checkpointing": True}],
)
def test_how_a_batch_is_cut_changes_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    plain = {"dropout": 0.0, "max_steps": 2, "eval_steps": 0}
    small_run.run(tmp_path / "a", **plain)
    small_run.run(tmp_path / "b", **plain | changes)
    want, got = kept(tmp_path / "a", 2), kept(tmp_path / "b", 2)
    assert set(got) == set(want)
    # The moments say what the gradients were; Adam makes much of the sign of one that is nearly nothing.
    for name, value in want.items():
        assert_close(got[name], value, 1e-2 if name.startswith(("weights.", "averaged.")) else 1e-4)
    if changes.get("gradient_checkpointing"):
        assert all(torch.equal(got[name], value) for name, value in want.items())


def test_the_host_is_never_moved_nor_kept(whole: Path) -> None:
    model = small_run.attach()
    tensors, about = training.checkpoints.load_checkpoint(whole / "checkpoints" / "step-00000009")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.removeprefix("weights.") for name in tensors if name.startswith("weights.")} == trained
    assert all(name.startswith("adapters.") for name in trained)
    groups = {name.split(".")[0] for name in tensors}
    assert groups == {"weights", "moments", "averaged"} and about["run"]["max_steps"] == 9
    _, after = small_run.run(whole)
    state = tiny.make("llama").state_dict()
    assert all(torch.equal(value, state[name]) for name, value in after.host.state_dict().items())


def test_it_learns_and_leaves_the_averaged_weights(tmp_path: Path) -> None:
    done, model = small_run.run(tmp_path, max_steps=25, ema_decay=0.9, dropout=0.0, save_steps=25, eval_steps=25)
    found = small_run.losses(tmp_path)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])
    tensors = kept(tmp_path, 25)
    for name, value in weights(model).items():
        assert torch.equal(value, tensors[f"averaged.adapters.{name}"])
        assert not torch.equal(value, tensors[f"weights.adapters.{name}"])
    assert math.isfinite(done.eval_loss) and not model.training


def test_early_stopping_keeps_the_best(tmp_path: Path) -> None:
    """Held-out rows that have nothing to do with those learned: their loss soon rises."""
    other = [training.Row("zzzzyyyyxxxx", memory=row.memory) for row in small_run.rows(7) if row.has_memory]
    done, model = small_run.run(
        tmp_path, max_steps=200, eval_steps=1, early_stopping_patience=3, eval_rows=other, ema_decay=0.0, dropout=0.0
    )
    assert done.stopped_early and done.global_step < 200 and done.global_step == done.best_global_step + 3
    rows_of = small_run.collator(tmp_path)
    total, count = training.sum_nats(model, rows_of.batch(other))
    assert float(total.detach()) / count == pytest.approx(done.best_eval_loss, rel=1e-4)
    again, _ = small_run.run(
        tmp_path, max_steps=200, eval_steps=1, early_stopping_patience=3, eval_rows=other, ema_decay=0.0, dropout=0.0
    )
    assert again.stopped_early and again.resumed_from_step == again.global_step == done.global_step


def test_a_checkpoint_of_other_settings_or_of_another_adapter_is_refused(whole: Path) -> None:
    with pytest.raises(ConfigError, match=r"other settings \(learning_rate: 0.01 there, 0.02 here\).*resume=false"):
        small_run.run(whole, learning_rate=2e-2)
    with pytest.raises(AdapterFileError, match="trained tensors differ"):
        small_run.run(whole, model=small_run.attach(feed_forward=0))


def test_a_damaged_checkpoint_is_named(whole: Path) -> None:
    file = whole / "checkpoints" / "step-00000009" / "state.safetensors"
    raw = bytearray(file.read_bytes())
    try:
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(AdapterFileError, match="wrong checksum"):
            small_run.run(whole)
    finally:
        file.write_bytes(raw)


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    model = small_run.attach()
    with torch.no_grad():
        next(model.adapters.parameters()).fill_(torch.nan)
        next(p for name, p in model.adapters.named_parameters() if name.endswith("gate")).fill_(1.0)
    with pytest.raises(NonFiniteError, match="weights of adapter 'default' are not finite.*lower learning rate"):
        small_run.run(tmp_path, model=model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "give max_steps or num_train_epochs"),
        ({"max_steps": 3, "num_train_epochs": 1.0}, "one of them"),
        ({"num_train_epochs": 0.0}, "num_train_epochs must be above 0"),
        ({"max_steps": 3, "early_stopping_patience": 2}, "set eval_steps"),
        ({"max_steps": 3, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"max_steps": 3, "ema_decay": 1.0}, "ema_decay must be in"),
        ({"max_steps": 3, "lr_scheduler_type": "polynomial"}, "lr_scheduler_type.*'cosine', 'linear', 'constant'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        training.TrainingConfig(**settings)


def test_half_precision_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixed_precision=fp16"):
        training.make_accelerator(device="cpu", mixed_precision="fp16")
    with pytest.raises(ConfigError, match="tracker 'comet_ml' is not installed"):
        training.make_accelerator(tmp_path, device="cpu", trackers=("comet_ml",))


def test_later_lines_of_metrics_and_half_ones_are_dropped(tmp_path: Path) -> None:
    accelerator = training.make_accelerator(device="cpu")
    log = training.MetricsLog(accelerator, tmp_path)
    for step in (1, 2, 3):
        log(step=step, loss=float(step), grad_norm=math.nan)
    with open(log.path, "a") as file:
        file.write('{"step": 1, "lo')
    training.MetricsLog(accelerator, tmp_path, step=2)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 1.0, "grad_norm": None}, {"step": 2, "loss": 2.0, "grad_norm": None}]


class TestAnyBatches:
    """Batches that are no `RowBatches`, of rows that are no `Row`: here numbers of rows of `X`."""

    X = torch.randn(31, 3, generator=torch.Generator().manual_seed(5))

    def loss_of(self, layer: torch.nn.Linear) -> Any:
        def loss(rows: object, seeds: object) -> tuple[torch.Tensor, int]:
            x = self.X[torch.tensor(rows)]
            return (layer(x) - 3 * x.sum(1, keepdim=True)).square().sum(), len(x)

        return loss

    def train(self, layer: torch.nn.Linear, batches: object, **given: object) -> training.TrainingResult:
        names = {"folder", "eval_rows", "loss", "log", "resume"} & set(given)
        more = {name: given.pop(name) for name in names}
        loss = more.pop("loss", self.loss_of(layer))
        config = training.TrainingConfig(**{"learning_rate": 0.3, "logging_steps": 1, **given})
        accelerator = training.make_accelerator(device="cpu")
        return training.train(layer, loss, batches, config, accelerator, progress=False, **more)

    def layer(self) -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1)

    def test_a_step_is_one_of_torch(self) -> None:
        """The loop, beside the same written out: AdamW on the gradient of the mean, clipped."""
        ours, theirs = self.layer(), self.layer()
        drawn = [[step, 2 * step + 1, 30 - step] for step in range(13)]
        self.train(ours, drawn, num_train_epochs=1, weight_decay=0.1, warmup_steps=3)
        optimizer = torch.optim.AdamW(training.parameter_groups(theirs, 0.3, weight_decay=0.1), betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: training.learning_rate_factor(n, 13, 3))
        for rows in drawn:
            total, targets = self.loss_of(theirs)(rows, [])
            optimizer.zero_grad()
            (total / targets).backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        assert_close(ours.weight, theirs.weight)
        assert_close(ours.bias, theirs.bias)

    def test_a_data_loader_resumed_within_an_epoch(self, tmp_path: Path) -> None:
        def loader() -> object:
            return torch.utils.data.DataLoader(range(31), batch_size=4, collate_fn=list)

        seen: list[list[int]] = []
        whole, killed, again = self.layer(), self.layer(), self.layer()

        def noted(rows: list[int], seeds: list[int]) -> tuple[torch.Tensor, int]:
            seen.append(rows)
            if len(seen) == 12:
                raise KeyboardInterrupt
            return self.loss_of(killed if len(seen) < 12 else again)(rows, seeds)

        settings = {"num_train_epochs": 2, "save_steps": 5, "folder": tmp_path}
        self.train(whole, loader(), num_train_epochs=2)
        assert self.train(killed, loader(), loss=noted, **settings).interrupted
        done = self.train(again, loader(), loss=noted, **settings)
        assert (done.resumed_from_step, done.global_step) == (10, 16)
        assert seen[12] == [8, 9, 10, 11] and torch.equal(again.weight, whole.weight)

    def test_a_run_begun_anew_leaves_no_checkpoint_of_the_one_before(self, tmp_path: Path) -> None:
        """They would be taken for later ones, and the new run's own be removed as the oldest."""
        drawn = [[step, step + 1] for step in range(7)]
        self.train(self.layer(), drawn, max_steps=6, save_steps=3, folder=tmp_path)
        assert training.last_step(tmp_path) == 6
        done = self.train(self.layer(), drawn, max_steps=2, resume=False, folder=tmp_path)
        assert (done.resumed_from_step, done.global_step, training.last_step(tmp_path)) == (0, 2, 2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]

    def test_what_cannot_be_counted(self) -> None:
        with pytest.raises(ConfigError, match="has no length, so epochs cannot be counted"):
            self.train(self.layer(), ([0] for _ in count()), num_train_epochs=1)
        with pytest.raises(ConfigError, match="batches=list has no batch_size: give RowBatches or a DataLoader"):
            self.train(self.layer(), [[0], [1]], max_steps=2, eval_rows=[3], eval_steps=1)
        with pytest.raises(ConfigError, match="no rows to train on"):
            self.train(self.layer(), iter([[0], [1]]), max_steps=3)
