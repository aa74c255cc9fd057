"""Rows: what they may hold, where they come from, and how what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mmattn
from mmattn import training
from mmattn.errors import ConfigError
from tests.data.row_files import class_folders, lines, picture


class TestLines:
    def test_everything_a_row_may_have(self, tmp_path: Path) -> None:
        import torch

        picture(tmp_path / "shown", "a.png")
        mmattn.Memory(torch.ones(1, 3, 5)).save(tmp_path / "seen.safetensors")
        file = lines(
            tmp_path / "rows.jsonl",
            {"text": "one", "image": "shown/a.png", "id": 7},
            "",
            {"text": "two", "prompt": "Say:", "images": ["shown/a.png"] * 2, "passages": ["p", "q"]},
            {"text": "three", "memory": "seen.safetensors", "image": None},
            {"text": "four"},
        )
        one, two, three, four = training.read_lines(file)
        assert one.images == (str(tmp_path / "shown" / "a.png"),) and one.has_memory
        assert (two.prompt, len(two.images), two.passages, two.text_length) == ("Say:", 2, ("p", "q"), 7)
        assert three.memory == str(tmp_path / "seen.safetensors") and not three.images
        assert not four.has_memory

    def test_broken_lines_are_named(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.jsonl"
        good = json.dumps({"text": "good"}).encode()
        broken = [
            good,
            b'{"text": "cut off',
            b"[1, 2]",
            b'{"text": "\xff"}',
            b'{"txt": "x"}',
            b'{"text": ""}',
            b'{"text": 5}',
            b'{"text": "x", "image": "gone.png"}',
            b'{"text": "x", "passages": ["", "y"]}',
            b'{"text": "x", "imgaes": ["y"]}',
            b'{"text": "\\ud800"}',
            b'{"prompt": "x"}',
            b'{"text": "x", "memory": 3}',
            good,
        ]
        file.write_bytes(b"\n".join(broken))
        with pytest.raises(ConfigError) as caught:
            training.read_lines(file)
        said = str(caught.value).splitlines()
        assert said[0].startswith(f"12 of 14 lines of {file} cannot be used")
        for number, (words, line) in enumerate(
            zip(
                [
                    "not sound JSON",
                    "an object",
                    "not UTF-8",
                    "unknown key 'txt'",
                    "is empty",
                    "must be text",
                    "no file",
                ],
                said[1:],
                strict=False,
            ),
            start=2,
        ):
            assert line.strip().startswith(f"line {number}:") and words in line
        assert "did you mean 'images'?" in said[9] and "surrogate" in said[10] and said[-1].strip() == "and 2 more"

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="has no rows"):
            training.read_lines(lines(tmp_path / "rows.jsonl", "", ""))
        with pytest.raises(ConfigError, match="there is no file"):
            training.read_lines(tmp_path / "gone.jsonl")
        with pytest.raises(ConfigError, match="there is no file or folder"):
            training.read_rows(str(tmp_path / "gone"))

    def test_what_a_unet_draws(self, tmp_path: Path) -> None:
        a, b = picture(tmp_path, "a.png", 1), picture(tmp_path, "b.png", 2)
        file = lines(
            tmp_path / "rows.jsonl",
            {"image": "a.png", "text": "a"},
            {"image": "a.png", "text": "", "example": "b.png"},
        )
        own, like = training.read_rows(str(file), "unet")
        assert (own.picture, own.images) == (str(a), (str(a),))
        assert (like.picture, like.images, like.text) == (str(a), (str(b),), "")
        with pytest.raises(ConfigError, match="the picture to be drawn"):
            training.read_lines(lines(tmp_path / "rows.jsonl", {"text": "a"}), "unet")


class TestFolders:
    def test_three_ways(self, tmp_path: Path) -> None:
        for name in ("captions", "metadata", "beside"):
            for number in range(3):
                picture(tmp_path / name, f"{number}.png", number)
        file = [{"file": f"{n}.png", "caption": f"picture {n}", "species": "x"} for n in range(3)]
        lines(tmp_path / "captions" / "captions.jsonl", *file)
        lines(
            tmp_path / "metadata" / "metadata.jsonl",
            *[{"file_name": f"{n}.png", "text": f"picture {n}"} for n in range(3)],
        )
        for number in range(3):
            (tmp_path / "beside" / f"{number}.txt").write_text(f"picture {number}\n")
        for name in ("captions", "metadata", "beside"):
            found = training.read_rows(str(tmp_path / name))
            assert [row.text for row in found] == ["picture 0", "picture 1", "picture 2"]
            assert [Path(row.images[0]).name for row in found] == ["0.png", "1.png", "2.png"]


class TestBroken:
    """What cannot be used is named, and left out only where that is asked for."""

    def test_lines(self, tmp_path: Path) -> None:
        file = lines(tmp_path / "rows.jsonl", {"text": "a"}, '{"text": ', {"text": "b"}, {"text": ""})
        rows = training.read_rows(str(file), skip_broken=True)
        assert [row.text for row in rows] == ["a", "b"]
        assert [one.split(":")[0] for one in rows.left_out] == ["rows.jsonl, line 2", "rows.jsonl, line 4"]
        with pytest.raises(ConfigError, match="2 of 4 lines"):
            training.read_rows(str(file))

    def test_texts_beside(self, tmp_path: Path) -> None:
        for name in ("a", "b", "c"):
            picture(tmp_path, f"{name}.png")
        (tmp_path / "a.txt").write_text("a tulip")
        (tmp_path / "b.txt").write_bytes(b"\xff")
        rows = training.read_rows(str(tmp_path), skip_broken=True)
        assert [row.text for row in rows] == ["a tulip"] and len(rows.left_out) == 2
        assert "b.txt: not UTF-8" in rows.left_out[0] and rows.left_out[1] == "c.png: no c.txt beside it"

    def test_an_empty_class_folder(self, tmp_path: Path) -> None:
        (class_folders(tmp_path) / "tulip").mkdir()
        rows = training.read_rows(str(tmp_path), skip_broken=True)
        assert (len(rows), rows.left_out) == (6, ("tulip: a class folder without pictures",))
        with pytest.raises(ConfigError, match="1 of 3 class folders"):
            training.read_rows(str(tmp_path))


class TestEncodings:
    """Invariant 75: a byte-order mark, CRLF, NUL and other encodings are read right, or named with their line."""

    FILES = ("captions.jsonl", "metadata.jsonl", "a.txt")

    @staticmethod
    def written(folder: Path, name: str, encoding: str, text: str = "a red\ntulip", end: str = "\n") -> list[Any]:
        """The rows of a folder of one picture whose text is in a file of this name and encoding."""
        picture(folder, "a.png")
        keys = {"captions.jsonl": ("file", "caption"), "metadata.jsonl": ("file_name", "text")}.get(name)
        content = text if keys is None else json.dumps({keys[0]: "a.png", keys[1]: text})
        (folder / name).write_bytes((content + "\n").replace("\n", end).encode(encoding))
        return list(training.read_rows(str(folder)))

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    def test_read_right(self, tmp_path: Path, name: str, encoding: str, end: str) -> None:
        assert [row.text for row in self.written(tmp_path, name, encoding, end=end)] == ["a red\ntulip"]

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize(
        ("encoding", "said"),
        [
            ("utf-16", "UTF-16"),
            ("utf-32", "UTF-32"),
            ("utf-16-le", "UTF-16"),
            ("utf-16-be", "UTF-16"),
            ("latin-1", "not UTF-8 "),
        ],
    )
    def test_named(self, tmp_path: Path, name: str, encoding: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said) as caught:
            text = '"' if name != "a.txt" else ""
            picture(tmp_path, "a.png")
            (tmp_path / name).write_bytes(f"{text}Blüte{text}\n".encode(encoding))
            training.read_rows(str(tmp_path))
        assert name in str(caught.value)

    def test_marks_between_joined_files(self, tmp_path: Path) -> None:
        """As `copy a.jsonl+b.jsonl` leaves them, each with its own."""
        (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\xef\xbb\xbf{"text": "b"}\r\n')
        assert [row.text for row in training.read_lines(tmp_path / "rows.jsonl")] == ["a", "b"]

    def test_lines_of_a_megabyte_and_rare_line_ends(self, tmp_path: Path) -> None:
        """What other programs take for the end of a line is text here."""
        texts = ["a" * (1 << 20), "one\u2028two\x85three\x0bfour"]
        content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
        (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")
        assert [row.text for row in training.read_lines(tmp_path / "rows.jsonl")] == texts

    def test_a_key_twice(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b", "text": "c"}\n')
        with pytest.raises(ConfigError, match="line 2: .*the key 'text' stands twice"):
            training.read_lines(tmp_path / "rows.jsonl")


class TestSplit:
    def test_shares_and_numbers(self) -> None:
        rows = [training.Row(f"row {number}") for number in range(20)]
        for asked, count in ((0.1, 2), (3, 3), (0.01, 1), (0, 0)):
            kept, away = training.split_rows(rows, asked, seed=1)
            assert len(away) == count and len(kept) == 20 - count
            assert {row.text for row in kept} | {row.text for row in away} == {row.text for row in rows}
        assert training.split_rows(rows, 3, 1) == training.split_rows(rows, 3, 1) != training.split_rows(rows, 3, 2)
        with pytest.raises(ConfigError, match="leave none to train on"):
            training.split_rows(rows, 20)

    def test_a_picture_is_on_one_side(self) -> None:
        rows = [training.Row(f"caption {i}", images=(f"{i % 4}.png",)) for i in range(20)]
        for seed in range(5):
            kept, away = training.split_rows(rows, 1, seed)
            assert {row.images for row in kept}.isdisjoint({row.images for row in away})
            assert len(away) == 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    """A small dataset of Hugging Face on the disk."""
    folder = tmp_path_factory.mktemp("dataset")
    images = [Image.new("RGB", (7, 5), (20 * n, 0, 0)) for n in range(6)]
    content = {"caption": [f"picture {n}" for n in range(6)], "picture": images, "source": ["here"] * 6}
    features = datasets.Features(
        {"caption": datasets.Value("string"), "picture": datasets.Image(), "source": datasets.Value("string")}
    )
    datasets.Dataset.from_dict(content, features=features).save_to_disk(str(folder))
    return folder


class TestDatasets:
    def test_columns(self, saved: Path) -> None:
        columns = {"text": "caption", "image": "picture"}
        rows = training.read_rows(str(saved), columns=columns)
        assert isinstance(rows, training.DatasetRows) and len(rows) == 6 and rows.text_lengths() == [9] * 6
        assert rows[2].text == "picture 2" and mmattn.load_image(rows[2].images[0]).size == (7, 5)
        kept, away = training.split_rows(rows, 2)
        assert (len(kept), len(away)) == (4, 2) and len(kept[:3]) == 3
        with pytest.raises(ConfigError, match=r"columns of .* are caption, picture, source.*nothing for text"):
            training.read_rows(str(saved))
        with pytest.raises(ConfigError, match="template only applies to class folders"):
            training.read_rows(str(saved), columns=columns, template="{label}")

    def test_classes(self, tmp_path: Path) -> None:
        """As the image datasets of the hub have them: a column of classes, and no texts."""
        datasets = pytest.importorskip("datasets")
        names = ["daisy", "lily-valley"]
        images = [Image.new("RGB", (7, 5), (20 * n, 0, 0)) for n in range(4)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        content = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 1, 0]}, features=features)
        content.save_to_disk(str(tmp_path / "one"))
        rows = training.read_rows(str(tmp_path / "one"), template="A {label}.")
        assert [row.text for row in rows] == ["A daisy.", "A lily valley.", "A lily valley.", "A daisy."]
        assert rows.text_lengths() == [len(row.text) for row in rows]
        assert rows.summary == "4 rows of a dataset (image=image, label=label)"
        stream = training.read_rows(str(tmp_path / "one"), streaming=True)
        assert [row.text for row in stream][1] == "A photo of a lily valley."
        kept, away = training.split_rows(rows, 1)
        assert {row.text for row in (*kept, *away)} == {"A daisy.", "A lily valley."}
        parts = {"train": content, "validation": content.select(range(1))}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "two"))
        assert training.held_out_split(str(tmp_path / "two")) == "validation"
        assert len(training.read_rows(str(tmp_path / "two"), split="validation")) == 1
        with pytest.raises(ConfigError, match="both a text and a label"):
            training.read_rows(str(tmp_path / "one"), columns={"text": "image", "label": "label"})

    @pytest.mark.parametrize(
        "path",
        ["nowhere", "./nowhere", "/no/where", "a/b/c", "pictures/", "my pictures", "org/rows.jsonl", "{}/nowhere"],
    )
    def test_what_looks_like_a_path_is_not_asked_of_the_hub(
        self, path: str, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load_dataset(*given: Any, **options: Any) -> Any:
            raise AssertionError("the hub was asked")

        monkeypatch.chdir(saved.parent)
        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        path = path.format(saved.name)
        with pytest.raises(ConfigError, match=f"there is no file or folder '{path}'.*named organisation/name"):
            training.read_rows(path)
        with pytest.raises(AssertionError, match="the hub was asked"):
            training.read_rows("org/name-1.2")

    def test_a_stream(self, saved: Path) -> None:
        rows = training.read_rows(str(saved), columns={"text": "caption", "image": "picture"}, streaming=True)
        kept, away = training.split_rows(rows, 2)
        assert [row.text for row in away] == ["picture 0", "picture 1"]
        assert [row.text for row in kept] == [row.text for row in kept] == [f"picture {n}" for n in range(2, 6)]
        with pytest.raises(ConfigError, match="a stream has no length"):
            training.split_rows(rows, 0.1)
        batches = training.RowBatches(kept, 3, seed=1)
        first = [[row.text for row in batch] for batch in batches.epoch(0)]
        assert [len(batch) for batch in first] == [3, 1] and batches.batches_per_epoch is None
        assert [[row.text for row in batch] for batch in batches.epoch(0, start=1)] == first[1:]
