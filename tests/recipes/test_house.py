"""Rules that hold for every recipe: a short train.py with `main` and `table`, and a device that is chosen."""

from __future__ import annotations

import pytest

from mmattn.recipes import Recipe, list_recipes, load_recipe

TRAINED = [recipe for recipe in list_recipes() if (recipe.folder / "train.py").is_file()]
NAMES = {"compose", "diffusion", "finetune", "listen", "rag", "translate", "vision", "vqa", "ways"}


@pytest.mark.parametrize("recipe", TRAINED, ids=lambda recipe: recipe.name)
def test_a_recipe_can_be_copied(recipe: Recipe) -> None:
    assert recipe.name in NAMES and len(TRAINED) == len(NAMES)
    assert len((recipe.folder / "train.py").read_text(encoding="utf-8").splitlines()) <= 300
    assert load_recipe(recipe.folder, "settings").Config().device == "auto"
    train = load_recipe(recipe.folder, "train")
    assert callable(train.main) and callable(train.table)
