"""Runs of every recipe can be compared: a finished one with a copy of which a setting and the table differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml

from mmattn import training


def check_compared(run: Path, folder: Path) -> None:
    """Compare a finished run with itself, as another seed that was better by one in every figure.

    Args:
        run: its folder.
        folder: for the copy.
    """
    copy = shutil.copytree(run, folder / "better", ignore=shutil.ignore_patterns("adapter", "checkpoints*", "*.npz"))
    settings = yaml.safe_load((copy / "config.resolved.yaml").read_text(encoding="utf-8"))
    (copy / "config.resolved.yaml").write_text(yaml.safe_dump(settings | {"seed": 90001}), encoding="utf-8")
    table = json.loads((copy / "table.json").read_text(encoding="utf-8"))
    rows = [{k: v + 1 if isinstance(v, (int, float)) else v for k, v in row.items()} for row in table["rows"]]
    (copy / "table.json").write_text(json.dumps(table | {"rows": rows}), encoding="utf-8")
    text = training.compare_runs({"first": [training.read_run(run)], "better": [training.read_run(copy)]})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert ["seed", str(settings["seed"]), "90001"] in lines and "of which 1 differ" in text
    figures = {key for row in table["rows"] for key, value in row.items() if isinstance(value, (int, float))}
    assert figures and all([figure, "first", "better"] in lines for figure in figures)
    named = [line for line in lines if line[0].startswith(table["rows"][0]["name"])]
    assert any(before != after for _, before, after in (line for line in named if len(line) == 3))
    assert len([line for line in lines if line[0] == "loss" and "lowest" in line]) == 1
