"""Whether an adapter uses its memory: the loss with the memories of other rows, its error, and the early warning."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmattn
from mmattn import training
from mmattn.training import evaluation
from tests import tiny
from tests.training import small_run


class TestEvaluation:
    """Of a "model" whose loss of a row is a number: the error against the formula written out."""

    def evaluate(self, own: Sequence[float], other: Sequence[float], batch_size: int) -> dict[str, float]:
        def loss(rows: Sequence[float], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
            return torch.tensor(rows, dtype=torch.float64).sum(), len(rows)

        accelerator = training.make_accelerator(device="cpu")
        return evaluation.evaluate(torch.nn.Linear(1, 1), loss, own, other, batch_size, accelerator)  # type: ignore[arg-type]

    def test_the_error_is_that_of_the_paired_difference(self) -> None:
        own = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 5
        gain = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        found = self.evaluate(own.tolist(), (own + gain).tolist(), batch_size=3)
        assert found["eval_loss"] == pytest.approx(float(own.mean()))
        assert found["eval_loss_shuffled"] - found["eval_loss"] == pytest.approx(float(gain.mean()))
        of_batches = gain.view(8, 3).mean(1)
        assert found["memory_gain_stderr"] == pytest.approx(float(of_batches.std() / math.sqrt(8)))

    def test_few_rows_are_enough_batches(self) -> None:
        """Eight rows fit into one batch, from which no error could be told."""
        found = self.evaluate([1.0] * 8, [1.0, 2.0] * 4, batch_size=64)
        assert found["memory_gain_stderr"] == pytest.approx(float(torch.tensor([0.0, 1.0] * 4).std() / math.sqrt(8)))
        assert math.isnan(self.evaluate([1.0], [2.0], batch_size=64)["memory_gain_stderr"])


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that is reported of an adapter."""
    folder = tmp_path_factory.mktemp("reported")
    small_run.run(folder, reported=True, logging_steps=2)
    return folder


class TestInTheLoop:
    def test_every_evaluation_is_logged(self, reported: Path) -> None:
        """Also between the steps that are logged, and at the end."""
        lines = training.read_metrics(reported / "metrics.jsonl")
        assert [line["step"] for line in lines] == [2, 3, 4, 6, 8, 9]
        assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 9]
        evaluated = [line for line in lines if "eval_loss" in line]
        assert all(line["eval_loss_shuffled"] != line["eval_loss"] for line in evaluated)
        assert all(line["memory_gain_stderr"] > 0 for line in evaluated)

    def test_reports_change_nothing_that_is_learned(self, reported: Path, tmp_path: Path) -> None:
        """Bit for bit: what is measured draws no random number and leaves no gradient."""
        small_run.run(tmp_path)
        assert small_run.sha256(tmp_path) == small_run.sha256(reported)

    @pytest.mark.slow
    def test_two_processes_measure_the_same(self, tmp_path: Path) -> None:
        """Of rows that do not divide by two."""
        plain = {"dropout": 0.0, "max_steps": 3, "gradient_accumulation_steps": 1, "reported": True}
        small_run.run(tmp_path / "one", **plain)  # type: ignore[arg-type]
        done = small_run.start(tmp_path / "two", processes=2, **plain)
        assert done.returncode == 0, done.stderr
        (one,), (two,) = (
            [line for line in training.read_metrics(tmp_path / name / "metrics.jsonl") if "eval_loss" in line]
            for name in ("one", "two")
        )
        for name in ("eval_loss", "eval_loss_shuffled", "memory_gain_stderr"):
            assert two[name] == pytest.approx(one[name], rel=1e-3), name
        for name in one:
            if name.startswith(("gate/", "gradients/")):
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-9), name


class Classes:
    """Texts of eight classes; the memory of a row shows its class, or nothing but noise."""

    def __init__(self, seen: bool) -> None:
        random = torch.Generator().manual_seed(7)
        shown = 2 * torch.randn(8, tiny.MEMORY_DIM, generator=random)
        self.rows = []
        for number in range(96):
            noise = torch.randn(1, 3, tiny.MEMORY_DIM, generator=random)
            memory = mmattn.Memory(shown[number % 8] + 0.1 * noise if seen else noise)
            self.rows.append(training.Row("abcdefgh"[number % 8] * 3, memory=memory))

    def train(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
        """The evaluations of a run, and what it said."""
        folder.mkdir()
        settings = {"max_steps": 40, "eval_steps": 10, "ema_decay": 0.0, "gradient_accumulation_steps": 1}
        small_run.run(
            folder, data=self.rows[:64], eval_rows=self.rows[64:], reported=True, dropout=0.0, logging_steps=40,
            save_steps=40, batch_size=8, **settings,
        )  # fmt: skip
        lines = [line for line in training.read_metrics(folder / "metrics.jsonl") if "eval_loss" in line]
        return lines, capsys.readouterr().out


class TestWarning:
    def test_an_adapter_that_cannot_see_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines, said = Classes(seen=False).train(tmp_path / "noise", capsys)
        assert said.count("adapter: the adapter ignores its memory") == 1, said
        assert "other rows" in said and "gate/" in said and len(said.splitlines()) == 1
        last = lines[-1]
        assert last["eval_loss_shuffled"] - last["eval_loss"] < 3 * last["memory_gain_stderr"]

    def test_one_that_learns_is_not(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines, said = Classes(seen=True).train(tmp_path / "seen", capsys)
        assert "ignores" not in said
        last = lines[-1]
        assert last["eval_loss_shuffled"] - last["eval_loss"] > 5 * last["memory_gain_stderr"]

    def lines(self, *gains: float, error: float | None = 0.1) -> list[dict[str, Any]]:
        """Evaluations with these gains, and lines without an evaluation between them."""
        found: list[dict[str, Any]] = []
        for number, gain in enumerate(gains):
            found.append({"step": 10 * number + 5, "loss": 1.0})
            losses = {"eval_loss": 2.0, "eval_loss_shuffled": 2.0 + gain, "memory_gain_stderr": error}
            found.append({"step": 10 * number + 10, **losses})
        return found

    @pytest.mark.parametrize(
        ("gains", "said"),
        [
            ((0.0, 0.1), None),
            ((0.0, 0.1, -0.5), "ignores its memory so far: in 3 evaluations up to step 30"),
            ((0.0, 0.1, -0.5, 0.0), None),
            ((0.0, 0.3, 0.1, 0.1), None),
            ((0.0, 0.3, 0.1, 0.1, 0.0), "ignores"),
            ((0.0, 0.0, 0.0, 0.3), "uses its memory from step 40 on"),
            ((0.0, 0.0, 0.0, 0.3, 0.4), None),
        ],
    )
    def test_it_is_said_once(self, gains: tuple[float, ...], said: str | None) -> None:
        warning = training.memory_warning(self.lines(*gains))
        assert warning is None if said is None else said in (warning or "")
        assert training.memory_warning([*self.lines(*gains), {"step": 99, "loss": 1.0}]) is None

    def test_without_an_error_only_what_is_equal_is_ignored(self) -> None:
        """One held-out batch: the error is not known, and JSON has null for it."""
        assert training.memory_warning(self.lines(0.0, 0.0, 0.0, error=None)) is not None
        assert training.memory_warning(self.lines(1e-3, 1e-3, 1e-3, error=None)) is None

    def test_a_resumed_run_knows_what_was_said(self, tmp_path: Path) -> None:
        accelerator = SimpleNamespace(is_main_process=True, trackers=[], print=lambda text: said.append(text))
        said: list[str] = []
        log = training.MetricsLog(accelerator, tmp_path)
        for line in self.lines(0.0, 0.0, 0.0):
            log(**line)
        again = training.MetricsLog(accelerator, tmp_path, step=30)
        again(**{**self.lines(0.0)[1], "step": 40})
        assert len(said) == 1
        assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1] == 40
