"""Folders of pictures by class, as torchvision's ImageFolder reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmattn import training
from mmattn.errors import ConfigError
from tests.data.row_files import class_folders, lines, picture


class TestClassFolders:
    def test_the_class_becomes_the_text(self, tmp_path: Path) -> None:
        rows = training.read_rows(str(class_folders(tmp_path)))
        assert [row.text for row in rows] == ["A photo of a daisy."] * 3 + ["A photo of a lily valley."] * 3
        assert [Path(row.images[0]).parent.name for row in rows] == ["daisy"] * 3 + ["lily-valley"] * 3
        assert rows.summary == "6 pictures in 2 class folders" and rows.left_out == ()
        rows = training.read_rows(str(tmp_path), template="{label}, {label}!")
        assert rows[0].text == "daisy, daisy!"
        with pytest.raises(ConfigError, match=r"where the name of the class belongs, with \{label\}; got 'A flower'"):
            training.read_rows(str(tmp_path), template="A flower")

    def test_what_other_programs_leave_behind(self, tmp_path: Path) -> None:
        class_folders(tmp_path)
        picture(tmp_path / ".ipynb_checkpoints", "0.png")
        picture(tmp_path / "__MACOSX" / "daisy", "0.png")
        (tmp_path / "daisy" / "._0.png").write_bytes(b"no picture")
        assert len(training.read_folder(tmp_path)) == 6

    def test_split_folders(self, tmp_path: Path) -> None:
        for name, each in (("train", 3), ("val", 2), ("Test", 1)):
            class_folders(tmp_path / name, each)
        assert len(training.read_rows(str(tmp_path))) == len(training.read_rows(str(tmp_path), split="train")) == 6
        assert len(training.read_rows(str(tmp_path), split="val")) == 4
        assert len(training.read_rows(str(tmp_path), split="validation")) == 4
        assert len(training.read_rows(str(tmp_path), split="test")) == 2
        assert training.held_out_split(str(tmp_path)) == "val"
        with pytest.raises(ConfigError, match="no split 'extra' in .*; there is: Test, train, val"):
            training.read_rows(str(tmp_path), split="extra")
        class_folders(tmp_path / "valid")
        with pytest.raises(ConfigError, match="two folders for the validation rows, val and valid"):
            training.read_rows(str(tmp_path))

    def test_classes_that_are_named_as_splits(self, tmp_path: Path) -> None:
        """Vehicles: a train is one of them."""
        rows = training.read_rows(str(class_folders(tmp_path, 1, ("car", "train"))))
        assert [row.text for row in rows] == ["A photo of a car.", "A photo of a train."]
        assert training.held_out_split(str(tmp_path)) is None
        with pytest.raises(ConfigError, match="the split 'val' is asked for"):
            training.read_rows(str(tmp_path), split="val")
        with pytest.raises(ConfigError, match="holds test, val and no folder train"):
            training.read_rows(str(class_folders(tmp_path / "other", 1, ("val", "test"))))

    def test_what_is_not_clear_is_refused(self, tmp_path: Path) -> None:
        def refused(name: str, said: str, **options: Any) -> None:
            with pytest.raises(ConfigError, match=said):
                training.read_rows(str(tmp_path / name), **options)

        picture(class_folders(tmp_path / "loose"), "stray.png")
        refused("loose", r"pictures beside its class folders \(stray.png\)")
        class_folders(tmp_path / "deep" / "more")
        refused("deep", r"more.daisy.0.png lies in a folder within a folder")
        class_folders(tmp_path / "one", names=("daisy",))
        refused("one", r"one class folder \(daisy\), so every picture would have the same text")
        assert len(training.read_rows(str(tmp_path / "one"), "unet")) == 3, (
            "to draw daisies alone is something to learn"
        )
        class_folders(tmp_path / "some")
        (tmp_path / "some" / "daisy" / "0.txt").write_text("a daisy")
        refused("some", "1 of the 6 pictures in .* have a .txt beside them, and others lie in folders without one")
        class_folders(tmp_path / "both")
        lines(tmp_path / "both" / "captions.jsonl", {"file": "daisy/0.png", "caption": "a daisy"})
        (tmp_path / "both" / "daisy" / "0.txt").write_text("a daisy")
        refused("both", "captions.jsonl and a .txt beside 1 of 6 pictures: texts can come from one of them")
        (tmp_path / "both" / "daisy" / "0.txt").unlink()
        refused(
            "both", "template is for class folders, and the texts of .* come from captions.jsonl", template="{label}"
        )
        lines(tmp_path / "both" / "metadata.jsonl", {"file_name": "daisy/0.png", "text": "a daisy"})
        refused("both", "captions.jsonl and metadata.jsonl")
        picture(tmp_path / "bare", "a.png")
        refused("bare", "1 picture and no texts for them; texts are given as a folder for each class")

    def test_what_is_found_is_said(self, tmp_path: Path) -> None:
        class_folders(tmp_path / "classes")
        (tmp_path / "classes" / "daisy" / "9.HEIC").write_bytes(b"from a telephone")
        said = "6 pictures in 2 class folders; 1 file of a kind that is not read (.heic)"
        assert training.read_rows(str(tmp_path / "classes")).summary == said
        class_folders(tmp_path / "beside", 1)
        for name in ("daisy", "lily-valley"):
            (tmp_path / "beside" / name / "0.txt").write_text(f"one {name}")
        rows = training.read_rows(str(tmp_path / "beside"))
        assert (rows.summary, rows[0].text) == ("2 pictures with a .txt beside each", "one daisy")
        class_folders(tmp_path / "named")
        lines(tmp_path / "named" / "captions.jsonl", {"file": "daisy/0.png", "caption": "a daisy"})
        said = "1 text in captions.jsonl; 5 other pictures in the folder have no line there"
        assert training.read_rows(str(tmp_path / "named")).summary == said
