"""Runs read back and put side by side, by the command too."""

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
            named = {} if model == "unnamed" else {"model": model}
            run.log(step=10 * number, loss=loss, eval_loss=loss + 1 if number == 1 else None, **named)
    if rows is not None:
        run.write_json("table.json", {"seed": 0, "rows": rows})
    return folder


def cells(text: str) -> dict[str, list[str]]:
    """The lines of a table by their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one recipe."""
    plain = {"optim": {"lr": 0.1, "steps": 40}, "word": None}
    rows = [{"name": "adapter", "loss": 0.5, "parameters": 247558}, {"name": "LoRA", "loss": 0.75, "parameters": 3}]
    first = make(tmp_path / "first", plain, rows, unnamed=[4.0, 3.0, 2.0, 1.0])
    better = [{**rows[0], "loss": 0.25, "named": 0.9}]
    second = make(tmp_path / "second", plain | {"optim": {"lr": 0.2, "steps": 40}}, better, unnamed=[4.0, 2.0])
    return first, second


@pytest.mark.parametrize(
    ("file", "content", "error", "named"),
    [
        ("config.resolved.yaml", None, ConfigError, "no config.resolved.yaml"),
        ("config.resolved.yaml", "- a list", ConfigError, "config.resolved.yaml"),
        ("config.resolved.yaml", "a: [", ConfigError, "config.resolved.yaml"),
        ("table.json", "{", AdapterFileError, "table.json"),
        ("table.json", "[]", AdapterFileError, "table.json"),
    ],
)
def test_what_is_no_run(two: tuple[Path, Path], file: str, content: str | None, error: Any, named: str) -> None:
    (two[0] / file).unlink()
    if content is not None:
        (two[0] / file).write_text(content)
    with pytest.raises(error, match=named):
        compared(*two)


def compared(*runs: Path) -> dict[str, list[str]]:
    return cells(training.compare_runs({run.name: run for run in runs}))


def test_settings_that_differ_figures_and_metrics(two: tuple[Path, Path]) -> None:
    table = compared(*two)
    assert table[""] == ["first", "second"] and table["optim.lr"] == ["0.1", "0.2"]
    assert not {"out", "word", "optim.steps"} & set(table)
    assert table["adapter: loss"] == ["0.5", "0.25"] and table["LoRA: loss"] == ["0.75", "–"]
    assert table["adapter: parameters"] == ["247,558", "247,558"] and table["adapter: named"] == ["–", "0.9"]
    assert table["last loss"] == ["1", "2"] and table["last eval_loss"] == ["5", "5"]


def test_runs_of_different_recipes(two: tuple[Path, Path], tmp_path: Path) -> None:
    """A setting or figure that a run lacks is "–"; rows of one name have a number."""
    rows = [{"name": "adapter", "loss": loss, "entries": 1000} for loss in (3.0, 7.0)]
    other = make(tmp_path / "other", {"optim": {"lr": 0.1}, "sizes": [7]}, rows, adapter=[9.0], control=[8.0])
    table = compared(two[0], other)
    assert table["sizes"] == ["–", "[7]"] and table["optim.steps"] == ["40", "–"] and "optim.lr" not in table
    assert table["adapter: loss"] == ["0.5", "3"] and table["adapter (2): loss"] == ["–", "7"]
    assert table["control: last loss"] == ["–", "8"]


def test_seeds_are_one_run(two: tuple[Path, Path], tmp_path: Path) -> None:
    """A run that is not finished is compared by its metrics."""
    for seed, loss in ((0, 1.0), (1, 2.0), (3, 3.0)):
        row = {"name": "adapter", "loss": loss, "parameters": 247558}
        rows = None if seed == 3 else [row]
        make(tmp_path / "seeds" / f"seed-{seed}", {"seed": seed}, rows, unnamed=[loss])
    table = compared(two[0], tmp_path / "seeds")
    assert table["adapter: loss"] == ["0.5", "1.5 ± 0.5"] and table["adapter: parameters"] == ["247,558", "247,558"]
    assert table["seed"] == ["0", "0, 1, 3"] and table["last loss"] == ["1", "2 ± 1"]


def test_one_run_is_nothing_to_compare(two: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="got 1"):
        compared(two[0])


def test_the_command(two: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    code, out, err = call(capsys, "compare", *two, "--metrics", "loss")
    assert code == 0, err
    assert out.strip() == training.compare_runs({run.name: run for run in two}, ["loss"])
    code, _, err = call(capsys, "compare", two[0], tmp_path)
    assert code == 2 and "config.resolved.yaml" in err
