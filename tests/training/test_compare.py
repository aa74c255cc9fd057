"""Runs read back and put side by side, by the command too; and run by a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmattn import training
from mmattn.errors import AdapterFileError, ConfigError
from tests.cli.running import call


def make(folder: Path, settings: dict[str, Any], rows: list[dict[str, Any]] | None, **losses: list[float]) -> Path:
    """A run's folder, as recipes write it: a loss every 10 steps, of each model by name."""
    run = training.RunFolder(folder)
    run.begin({"out": str(folder), "seed": 0, **settings})
    for model, values in losses.items():
        for number, loss in enumerate(values, start=1):
            named = {} if model == "own" else {"model": model}
            run.log(step=10 * number, loss=loss, eval_loss=loss + 1 if number == len(values) else None, **named)
    if rows is not None:
        run.write_json("table.json", {"seed": 0, "rows": rows})
    return folder


def cells(text: str) -> list[list[str]]:
    """The lines of all tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one recipe."""
    plain = {"optim": {"lr": 0.1, "steps": 40}, "word": None}
    rows = [{"name": "adapter", "loss": 0.5, "parameters": 247558}, {"name": "LoRA", "loss": 0.75, "parameters": 3}]
    first = make(tmp_path / "first", plain, rows, own=[4.0, 3.0, 2.0, 1.0])
    better = [{**rows[0], "loss": 0.25, "named": 0.9}]
    second = make(tmp_path / "second", plain | {"optim": {"lr": 0.2, "steps": 40}}, better, own=[4.0, 2.0])
    return first, second


class TestSavedRuns:
    def test_what_it_left(self, two: tuple[Path, Path]) -> None:
        run = training.read_run(two[0])
        assert run.settings["optim.lr"] == 0.1 and run.settings["word"] is None
        assert [row["name"] for row in run.rows] == ["adapter", "LoRA"]
        assert run.values("loss") == {10: 4.0, 20: 3.0, 30: 2.0, 40: 1.0} and run.values("eval_loss") == {40: 2.0}
        assert run.values("bleu") == {}

    def test_each_model_has_its_own_metrics(self, tmp_path: Path) -> None:
        folder = make(tmp_path, {}, None, own=[1.0], LoRA=[2.0, 1.5])
        run = training.read_run(folder)
        assert {model: run.values("loss", model) for model in run.metrics} == {
            "": {10: 1.0},
            "LoRA": {10: 2.0, 20: 1.5},
        }

    def test_what_is_no_run(self, tmp_path: Path, two: tuple[Path, Path]) -> None:
        with pytest.raises(ConfigError, match="is not the folder of a run: it has no config.resolved.yaml"):
            training.read_run(tmp_path)
        (two[0] / "table.json").write_text("{")
        with pytest.raises(AdapterFileError, match=r"table.json"):
            training.read_run(two[0])
        (two[1] / "config.resolved.yaml").write_text("- a list")
        with pytest.raises(ConfigError, match="must hold settings, got list"):
            training.read_run(two[1])


class TestCompare:
    def compared(self, *runs: Path) -> str:
        return training.compare_runs({run.name: training.read_seeds(run) for run in runs})

    def test_settings_that_differ_and_no_others(self, two: tuple[Path, Path]) -> None:
        text = self.compared(*two)
        assert "5 settings in common, of which 1 differ." in text
        table = cells(text)
        assert table[0] == ["setting", "first", "second"] and table[2] == ["optim.lr", "0.1", "0.2"]
        assert not any(line[0] in ("out", "word", "optim.steps") for line in table)

    def test_tables_side_by_side(self, two: tuple[Path, Path]) -> None:
        text = self.compared(*two)
        table = cells(text)
        at = table.index(["loss", "first", "second"])
        assert table[at + 2 : at + 4] == [["adapter", "0.5", "0.25"], ["LoRA", "0.75", "–"]]
        assert ["adapter", "247,558", "247,558"] in table
        assert "In the table of second alone: named." in text

    def test_metrics(self, two: tuple[Path, Path]) -> None:
        table = cells(self.compared(*two))
        at = table.index(["loss", "last step", "last", "lowest"])
        assert table[at + 2 : at + 4] == [["first", "40", "1", "1"], ["second", "20", "2", "2"]]

    def test_runs_of_different_recipes(self, two: tuple[Path, Path], tmp_path: Path) -> None:
        """What is common is compared, and what is not is named."""
        rows = [{"name": "adapter", "loss": 3.0, "bits": 1.0, "entries": size} for size in (1000, 20000)]
        other = make(tmp_path / "other", {"optim": {"lr": 0.1}, "sizes": [7]}, rows, adapter=[9.0], control=[8.0])
        text = self.compared(two[0], other)
        assert "3 settings in common, of which 0 differ." in text
        assert "Not in all of them, but in first: optim.steps, word." in text
        assert "Not in all of them, but in other: sizes." in text
        table = cells(text)
        assert ["adapter (2)", "–", "3"] in table and ["adapter", "0.5", "3"] in table
        assert "In the table of other alone: bits, entries." in text
        assert ["other: control", "10", "8", "8"] in table

    def test_seeds_are_one_run(self, two: tuple[Path, Path], tmp_path: Path) -> None:
        for seed, loss in ((0, 1.0), (1, 2.0), (10, 3.0)):
            row = {"name": "adapter", "loss": loss, "parameters": 247558}
            make(tmp_path / "seeds" / f"seed-{seed}", {"seed": seed}, [row], own=[loss])
        assert [run.path.name for run in training.read_seeds(tmp_path / "seeds")] == ["seed-0", "seed-1", "seed-10"]
        table = cells(self.compared(two[0], tmp_path / "seeds"))
        assert ["adapter", "0.5", "2 ± 1"] in table and ["adapter", "247,558", "247,558"] in table
        assert ["seed", "0", "0, 1, 10"] in table and ["seeds", "10", "2", "2"] in table

    def test_one_that_goes_on_is_compared_by_its_metrics(self, two: tuple[Path, Path], tmp_path: Path) -> None:
        going = make(tmp_path / "going", {}, None, own=[5.0])
        text = self.compared(two[0], going)
        assert "Without a table, as it is not finished or measured nothing: going." in text
        assert ["going", "10", "5", "5"] in cells(text)

    def test_one_run_is_nothing_to_compare(self, two: tuple[Path, Path]) -> None:
        with pytest.raises(ConfigError, match="name two runs or more, got 1"):
            self.compared(two[0])


class TestCommand:
    def test_it_prints_and_plots(self, two: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
        from PIL import Image

        code, out, err = call(capsys, "compare", *two, "-o", tmp_path / "curves.png")
        assert code == 0, err
        assert training.compare_runs({run.name: training.read_seeds(run) for run in two}) in out
        with Image.open(tmp_path / "curves.png") as picture:
            assert picture.height > 0.8 * picture.width, "two panels, of loss and eval_loss"
        code, out, _ = call(capsys, "compare", *two, "--metrics", "loss", "-o", tmp_path / "loss.png")
        with Image.open(tmp_path / "loss.png") as picture:
            assert code == 0 and picture.height < 0.8 * picture.width and "eval_loss" not in out

    def test_what_is_no_run_is_refused(self, two: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
        code, _, err = call(capsys, "compare", two[0], tmp_path)
        assert code == 2 and "is not the folder of a run" in err
        code, out, _ = call(capsys, "compare", *two, "--metrics", "bleu", "-o", tmp_path / "none.png")
        assert code == 0 and "no run has bleu in its metrics" in out and not (tmp_path / "none.png").exists()
