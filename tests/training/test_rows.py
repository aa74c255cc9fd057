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


def picture(folder: Path, name: str, colour: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (7, 5), (colour, 3 * colour % 256, 50)).save(folder / name)
    return folder / name


def lines(path: Path, *given: Any) -> Path:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in given), encoding="utf-8")
    return path


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
                ["not JSON", "an object", "not UTF-8", "unknown key 'txt'", "is empty", "must be text", "no file"],
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
        with pytest.raises(ConfigError, match="neither a .jsonl file, a folder of pictures"):
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

    def test_what_is_missing(self, tmp_path: Path) -> None:
        picture(tmp_path, "a.png")
        picture(tmp_path, "b.png")
        (tmp_path / "b.txt").write_text(" \n")
        with pytest.raises(ConfigError, match=r"2 of 2 pictures .*\n  a.png: no a.txt .*\n  b.txt: 'text' is empty"):
            training.read_folder(tmp_path)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="holds no pictures"):
            training.read_folder(tmp_path / "empty")


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
            ("utf-16-le", "NUL at byte 2: UTF-16, or not text; save it as UTF-8"),
            ("utf-16-be", "NUL at byte 1: UTF-16"),
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
        with pytest.raises(ConfigError, match="line 2: the key 'text' stands there twice"):
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
    datasets.Dataset.from_dict(content, features=features).save_to_disk(folder)
    return folder


class TestDatasets:
    def test_columns(self, saved: Path) -> None:
        columns = {"text": "caption", "image": "picture"}
        rows = training.read_rows(str(saved), columns=columns)
        assert isinstance(rows, training.DatasetRows) and len(rows) == 6 and rows.text_lengths() == [9] * 6
        assert rows[2].text == "picture 2" and rows[2].images[0].size == (7, 5)
        kept, away = training.split_rows(rows, 2)
        assert (len(kept), len(away)) == (4, 2) and len(kept[:3]) == 3
        with pytest.raises(ConfigError, match=r"columns of .* are caption, picture, source.*nothing for text"):
            training.read_rows(str(saved))

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
