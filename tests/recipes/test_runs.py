"""Every recipe from beginning to end: its table with all controls, its files, and what a second start does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmattn.recipes import Recipe, find_recipe, list_recipes, load_recipe, read_settings
from tests.models.test_pretrained import need
from tests.recipes.runs import RUNS, settings_of

TRAINED = [recipe for recipe in list_recipes() if (recipe.folder / "train.py").is_file()]
NAMES = {"compose", "diffusion", "finetune", "listen", "rag", "translate", "vision", "vqa", "ways"}
CONFIGS = [file for recipe in TRAINED for file in sorted(recipe.folder.glob("config*.yaml"))]


@pytest.mark.parametrize("recipe", TRAINED, ids=lambda recipe: recipe.name)
def test_a_recipe_can_be_copied(recipe: Recipe) -> None:
    assert recipe.name in NAMES and len(TRAINED) == len(NAMES) and (recipe.folder / "data.py").is_file()
    assert len((recipe.folder / "train.py").read_text(encoding="utf-8").splitlines()) <= 300
    assert load_recipe(recipe.folder, "settings").Config().device == "auto"
    train = load_recipe(recipe.folder, "train")
    assert callable(train.main) and callable(train.table)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_its_settings_are_known(config: Path) -> None:
    settings = read_settings(config)
    assert settings.pop("recipe") == config.parent.name
    load_recipe(config.parent, "settings").Config(**settings)


def measured(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The figures of a row that do not depend on its training."""
    row = next(row for row in rows if row["name"] == name)
    return {key: value for key, value in row.items() if key not in ("name", "parameters", "seconds")}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, finished: Callable[[str], Path], run_folder: Path) -> None:
    if name == "vqa":
        for model in ("smollm2", "efficientnet-lite0", "easy-vqa"):
            need(model)
    run, out = RUNS[name], finished(name)
    content = json.loads((out / "table.json").read_text())
    assert tuple(row["name"] for row in content["rows"]) == run.rows
    figures = [value for row in content["rows"] for value in row.values() if isinstance(value, float)]
    assert figures and all(map(math.isfinite, figures))
    for first, second in run.equal:
        assert measured(content["rows"], first) == measured(content["rows"], second)
    sized = [(row["name"], row["parameters"]) for row in content["rows"] if row.get("parameters")]
    lora, adapter = ([size for name, size in sized if name.startswith(kind)] for kind in ("LoRA", "adapter"))
    assert not (lora and adapter) or abs(lora[0] / adapter[0] - 1) < 0.05
    train = load_recipe(find_recipe(run.recipe).folder, "train")
    text = (out / "table.md").read_text(encoding="utf-8")
    assert all(row in text for row in run.rows) and "±" in train.table([content, content])
    resolved = yaml.safe_load((out / "config.resolved.yaml").read_text(encoding="utf-8"))
    assert resolved["seed"] == 0 and (out / "metrics.jsonl").read_text()
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()}
    train.main(settings_of(name, run_folder))
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()} == before, "finished runs stay"
