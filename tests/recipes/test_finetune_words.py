"""The drawings to try the recipe on, and how often each word of a caption is right, beside a linear probe."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from mmattn import training
from tests.models.test_pretrained import need
from tests.recipes.runs import settings_of

RECIPE = "finetune"


@pytest.fixture(scope="module")
def drawings(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the drawings."""
    folder: Path = tmp_path_factory.mktemp("made") / "drawings"
    recipe.drawings.make(folder, seed=3)
    return folder


def read_pixels(file: Path) -> Any:
    """The pixels of a drawing."""
    with Image.open(file) as picture:
        return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(160, 160, 3).int()


class TestDrawings:
    def test_every_combination_is_trained_on_and_others_are_held_out(self, drawings: Path) -> None:
        splits = training.read_rows(drawings)
        assert len(set(splits["train"]["text"])) == len(splits["train"]) == 144
        assert len(set(splits["validation"]["text"])) == len(splits["validation"]) == 48
        files = {split: sorted((drawings / split).glob("*.png")) for split in ("train", "val")}
        assert not {file.read_bytes() for file in files["train"]} & {file.read_bytes() for file in files["val"]}

    def test_a_caption_says_what_is_drawn(self, recipe: SimpleNamespace, drawings: Path) -> None:
        """The pixels that differ from the background lie at the place, and have the colour nearest to it."""
        for line in (drawings / "val" / "metadata.jsonl").read_text().splitlines():
            row = json.loads(line)
            _, colour, _, _, _, place = row["text"].rstrip(".").split()
            pixels = read_pixels(drawings / "val" / row["file_name"])
            inside = (pixels - pixels[0, 0]).abs().sum(2) > 0
            y, x = (at.float().mean() / 160 for at in inside.nonzero(as_tuple=True))
            nearest = min(recipe.drawings.PLACES, key=lambda name: torch.dist(
                torch.tensor(recipe.drawings.PLACES[name]), torch.stack((x, y))
            ))  # fmt: skip
            mean = pixels[inside].float().mean(0)
            colours = recipe.drawings.COLOURS
            assert place == nearest
            assert colour == min(colours, key=lambda name: torch.dist(torch.tensor(colours[name]).float(), mean))

    def test_a_seed_draws_the_same(self, recipe: SimpleNamespace, drawings: Path, tmp_path: Path) -> None:
        recipe.drawings.make(tmp_path / "same", seed=3)
        recipe.drawings.make(tmp_path / "other", seed=4)
        first = Path("train") / "000.png"
        assert (tmp_path / "same" / first).read_bytes() == (drawings / first).read_bytes()
        assert (tmp_path / "other" / first).read_bytes() != (drawings / first).read_bytes()

    def test_pictures_of_easy_vqa(self, recipe: SimpleNamespace, tmp_path: Path) -> None:
        need("easy-vqa")
        recipe.drawings.copy_easy_vqa(tmp_path / "shapes")
        splits = training.read_rows(tmp_path / "shapes")
        assert [len(splits[name]) for name in ("train", "validation")] == [120, 48]
        shapes = {text.split()[2] for split in splits.values() for text in split["text"]}
        assert shapes == {"circle.", "rectangle.", "triangle."}


class TestWords:
    TEXTS = ("A red house.", "A blue house.", "A red tree.", "A blue tree.")

    def test_words_with_a_few_values_that_come_back(self, recipe: SimpleNamespace) -> None:
        read = recipe.probe.read_words
        assert read(["A red boat.", "A boat", ""], self.TEXTS) == {
            "word 2": ["red", "boat", None],
            "word 3": ["boat.", None, None],
        }
        assert read(self.TEXTS, [*self.TEXTS, "A green one."]) == {}, "of five texts no word has two values at most"
        assert read(self.TEXTS, [f"A {k} house." for k in range(47)]) == {}

    def test_whole_texts_where_they_differ_in_length(self, recipe: SimpleNamespace) -> None:
        known = ["A daisy.", "A lily of the valley."] * 2
        assert recipe.probe.read_words(["A daisy. "], known) == {"text": ["A daisy."]}
        assert recipe.probe.read_words(known, known[:2]) == {}, "no text comes back"

    def test_a_probe_reads_what_is_linear(self, recipe: SimpleNamespace) -> None:
        random = torch.Generator().manual_seed(0)
        train, test = (torch.randn(count, 7, generator=random) for count in (211, 97))
        words = [["low", "high"][int(row[3] > 0)] for row in train]
        found = recipe.probe.probe(train, test, words)
        right = sum((word == "high") == bool(row[3] > 0) for word, row in zip(found, test, strict=True))
        assert right >= 92 and recipe.probe.probe(train, test, words) == found

    def rows(self, count: int, **columns: Any) -> list[dict[str, Any]]:
        """Rows whose memories have the colour in their first number, and the thing in their second."""
        random = torch.Generator().manual_seed(count)
        rows = []
        for k in range(count):
            memory = torch.randn(3, 5, generator=random) / 10
            memory[:, 0] += k % 2
            memory[:, 1] += k // 2 % 2
            text = f"A {('red', 'blue')[k % 2]} {('house', 'tree')[k // 2 % 2]}."
            row = {"text": text, "memory": memory, "segments": torch.zeros(3, dtype=torch.long), "scores": None}
            rows.append(row | columns)
        return rows

    def test_the_adapter_is_measured_beside_the_probe(self, recipe: SimpleNamespace) -> None:
        train, test = self.rows(41), self.rows(13)

        def write(model: Any, memory: Any, prompts: list[str]) -> list[str]:
            assert memory.tokens.shape == (13, 3, 5) and prompts == [""] * 13
            return ["A red house."] * 13

        found = recipe.probe.measure(SimpleNamespace(write=write), None, train, test)
        assert found == {
            "adapter, its own memory": {"word 2": 7 / 13, "word 3": 7 / 13},
            "linear probe": {"word 2": 1, "word 3": 1},
        }
        asked = self.rows(41, prompt="Say it:")
        assert recipe.probe.measure(SimpleNamespace(write=write), None, asked, test) == {}

    def test_the_table_has_a_column_for_each_word(self, recipe: SimpleNamespace) -> None:
        own = recipe.report.table_row("adapter, its own memory", 0.5, 11, 3.0, "language")
        shuffled = recipe.report.table_row("adapter, shuffled memory", 1.5, 11, 3.0, "language")
        words = {"adapter, its own memory": {"word 2": 0.75}, "linear probe": {"word 2": 0.875}}
        rows = recipe.report.with_words([own, shuffled], words)
        head, _, first, second, third, _, notes = recipe.train.table([{"rows": rows}]).splitlines()
        assert [cell.strip() for cell in head.split("|")[1:-1]][-1] == "word 2 right"
        assert [line.split("|")[-2].strip() for line in (first, second, third)] == ["75 %", "–", "88 %"]
        assert "Linear probe: " in notes and "LoRA" not in notes
        assert "right" not in recipe.train.table([{"rows": [own, shuffled]}])


@pytest.mark.slow
def test_a_run_prints_the_probe(recipe: SimpleNamespace, drawings: Path, tmp_path: Path) -> None:
    asked = settings_of("finetune", tmp_path)
    asked["data"] |= {"path": str(drawings), "held_out": None}
    asked["eval"] = {"eval_steps": 0}
    rows = json.loads((recipe.train.main(asked) / "table.json").read_text())["rows"]
    own, shuffled, probe = (row | {"name": row["name"]} for row in rows)
    assert [row["name"] for row in (own, shuffled, probe)] == [
        "adapter, its own memory", "adapter, shuffled memory", "linear probe",
    ]  # fmt: skip
    assert set(own) - set(shuffled) == {"word 2", "word 3", "word 6"} and probe["loss"] is None
    assert probe["word 2"] > 0.5 and all(0 <= own[name] <= 1 for name in ("word 2", "word 3", "word 6"))
