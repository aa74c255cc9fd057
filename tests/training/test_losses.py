"""What loops are made of: groups of parameters, losses in nats, the folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mmattn
from mmattn import training
from mmattn.errors import ConfigError
from tests import tiny


class TestParameterGroups:
    def test_gates_have_their_own_rate_and_no_decay(self) -> None:
        model = mmattn.attach(tiny.make("llama"), mmattn.GatedAdapter(memory_dim=24, every=1, num_heads=2, head_dim=8))
        groups = training.parameter_groups(model.adapters, 1e-3, gate_learning_rate=5e-2, weight_decay=0.1)
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        assert {id(p) for group in groups for p in group["params"]} == trained
        by_rate = {group["lr"]: group for group in groups}
        gates = [p for name, p in model.adapters.named_parameters() if name.endswith(".gate")]
        assert gates and {id(p) for p in by_rate[5e-2]["params"]} == {id(p) for p in gates}
        assert [all(p.dim() > 1 for p in group["params"]) for group in groups if group["weight_decay"]] == [True]

    def test_nothing_trained(self) -> None:
        with pytest.raises(ConfigError, match="no parameter"):
            training.parameter_groups(nn.Linear(3, 5).requires_grad_(False), 0.1)


class TestScores:
    def test_the_loss_is_that_of_the_host(self) -> None:
        """Token by token, and its mean over the tokens of the batch."""
        lm, rows = tiny.make("llama"), [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
        batch = training.collate(rows)
        nats = training.token_nats(lm, batch).detach()
        for row, line in zip(rows, nats, strict=True):
            ids = torch.tensor([row])
            assert float(line.sum()) / (len(row) - 1) == pytest.approx(
                float(lm(ids, labels=ids).loss.detach()), rel=1e-5
            )
        assert float(training.mean_nats(lm, batch).detach()) == pytest.approx(float(nats.sum()) / 7, rel=1e-5)


class TestRunFolder:
    def test_metrics_and_tables(self, tmp_path: Path) -> None:
        run = training.RunFolder(tmp_path / "a" / "b")
        run.log(step=1, loss=float("nan"))
        run.log(step=2, loss=0.5)
        text = (run.path / "metrics.jsonl").read_text()
        assert text == '{"step": 1, "loss": null}\n{"step": 2, "loss": 0.5}\n'
        run.write_config({"b": 1, "a": {"c": None}})
        assert (run.path / "config.resolved.yaml").read_text() == "b: 1\na:\n  c: null\n"
        assert (training.RunFolder(run.path).path / "metrics.jsonl").read_text() == text

    def test_a_finished_run_is_left_as_it_is(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        settings = {"out": "here", "seed": 3, "optim": {"betas": (1, 2)}, "progress": True}
        run = training.RunFolder(tmp_path / "run")
        assert run.begin(settings)
        run.log(step=1)
        assert run.begin(settings), "it has no table yet"
        run.log(step=2)
        run.write_json("table.json", {"rows": []})
        capsys.readouterr()
        again = training.RunFolder(tmp_path / "run")
        assert not again.begin(settings | {"progress": False, "out": "there"})
        said = capsys.readouterr().out
        assert said.count("\n") == 1 and f"{tmp_path / 'run'} holds the finished run" in said and "out=FOLDER" in said
        assert (run.path / "metrics.jsonl").read_text() == '{"step": 2}\n'
        assert again.begin(settings | {"seed": 4}), "other settings"
        assert not (run.path / "table.json").exists() and (run.path / "metrics.jsonl").read_text() == ""
