"""Datasets of rows: where they come from, the columns they get, and how what cannot be read is named."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pictures

import mmattn
from mmattn import training
from mmattn.errors import ConfigError
from tests.data.encoded_rows import picture


def read(path: str | Path, **options: Any) -> Any:
    """The training rows."""
    return training.read_rows(path, **{"split": "train", **options})


def lines(path: Path, *given: Any) -> Path:
    """Objects, or what is to stand in a line, one for each line."""
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in given), encoding="utf-8")
    return path


class TestFiles:
    def test_columns_and_paths(self, tmp_path: Path) -> None:
        """Paths start at the folder of the file."""
        picture(tmp_path / "shown" / "a.png")
        file = lines(
            tmp_path / "rows.jsonl",
            {"text": "one", "image": "shown/a.png", "id": "7"},
            {"text": "two", "prompt": "Say:", "images": ["shown/a.png"] * 2, "passages": ["p", "q"]},
            {"text": "three", "memory": "seen.safetensors", "image": None},
        )
        one, two, three = read(file)
        path = str(tmp_path / "shown" / "a.png")
        assert one["image"] == path and one["images"] is None
        assert (two["prompt"], two["images"], two["passages"]) == ("Say:", [path, path], ["p", "q"])
        assert three["memory"] == str(tmp_path / "seen.safetensors") and three["image"] is None
        assert training.memory_kinds(read(file)) == {"pictures", "passages", "memories"}
        (tmp_path / "rows.csv").write_text("text,passage\na,b\n")
        assert list(read(tmp_path / "rows.csv")) == [{"text": "a", "passage": "b"}]
        assert list(training.read_rows(file)) == ["train"], "all splits by name, as load_dataset has them"

    def test_byte_order_mark_and_line_ends(self, tmp_path: Path) -> None:
        """Invariant 75."""
        texts = ["a" * (1 << 20), "one\u2028two\x85three\x0bfour", "ü"]
        content = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
        (tmp_path / "rows.jsonl").write_bytes(content.encode())
        assert read(tmp_path / "rows.jsonl")["text"][:] == texts
        picture(tmp_path / "beside" / "a.png")
        (tmp_path / "beside" / "a.txt").write_bytes("\ufeffa red\r\n tulip\r\n".encode())
        assert read(tmp_path / "beside")["text"][:] == ["a red\n tulip"]

    @pytest.mark.parametrize(
        ("raw", "values"),
        [
            (b'{"text": "a"}\n{"text": "cut', "rows.jsonl.*row 1"),
            (b'{"text": "a"}\n[1, 2]\n', "rows.jsonl.*row"),
            (b'{"text": "\xff"}\n', "rows.jsonl.*UTF8"),
            ('{"text": "a"}\n'.encode("utf-16"), "rows.jsonl.*row 0"),
            (b'{"text": "a", "imgaes": "x"}\n', "rows.jsonl.*'imgaes'.*'images'"),
            (b'{"prompt": "a"}\n', "rows.jsonl.*nothing for .*text"),
            (b"", "rows.jsonl"),
        ],
    )
    def test_broken_files(self, raw: bytes, values: str, tmp_path: Path) -> None:
        """Invariant 75: the file is named, and the row where that is known."""
        (tmp_path / "rows.jsonl").write_bytes(raw)
        with pytest.raises(ConfigError, match=values):
            read(tmp_path / "rows.jsonl")

    @pytest.mark.parametrize(
        "path", ["nowhere", "./nowhere", "/no/where", "a/b/c", "rows.jsonl", "data/*.tar", "here/no"]
    )
    def test_what_looks_like_a_path_is_not_asked_of_the_hub(
        self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load_dataset(*given: Any, **options: Any) -> Any:
            raise AssertionError("the hub was asked")

        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        with pytest.raises(ConfigError, match=f"no file or folder '{path.replace('*', '.')}' of rows"):
            read(path)
        with pytest.raises(AssertionError, match="the hub was asked"):
            read("org/name-1.2")


class TestFolders:
    def test_class_folders(self, tmp_path: Path) -> None:
        for place, name in enumerate(("daisy", "lily-valley")):
            for number in range(3):
                picture(tmp_path / name / f"{number}.png", 40 * place + number)
        rows = read(tmp_path)
        assert rows["text"][:] == ["A photo of a daisy."] * 3 + ["A photo of a lily valley."] * 3
        assert [Path(image["path"]).parent.name for image in rows["image"]] == ["daisy"] * 3 + ["lily-valley"] * 3
        assert read(tmp_path, template="{label}, {label}!")["text"][0] == "daisy, daisy!"
        stream = read(tmp_path, streaming=True, template="A {label}.")
        assert next(iter(stream))["text"] == "A daisy."
        with pytest.raises(ConfigError, match=r"template='A flower'.*\{label\}"):
            read(tmp_path, template="A flower")

    @pytest.mark.parametrize("kind", ["metadata", "beside"])
    def test_texts_of_pictures_by_split(self, kind: str, tmp_path: Path) -> None:
        """With two lines for a picture, in the folders train, val and test."""
        for folder in ("train", "val", "test"):
            place = tmp_path / folder
            for number in range(2):
                picture(place / f"{number}.png", number)
                if kind == "beside":
                    (place / f"{number}.txt").write_text(f"{folder} {number}\n")
            if kind == "metadata":
                lines(place / "metadata.jsonl", *({"file_name": f"{n}.png", "text": f"{folder} {n}"} for n in range(2)))
        picture(tmp_path / "train" / ".ipynb_checkpoints" / "0.png")
        splits = training.read_rows(tmp_path)
        assert list(splits) == ["train", "validation", "test"] or set(splits) == {"train", "validation", "test"}
        assert sorted(splits["validation"]["text"]) == ["val 0", "val 1"] and len(splits["train"]) == 2
        assert training.read_rows(tmp_path, split="test")["text"][:] == ["test 0", "test 1"]
        assert [row["text"] for row in read(tmp_path, streaming=True)] == ["train 0", "train 1"]

    def test_a_picture_without_its_text(self, tmp_path: Path) -> None:
        """It is a row without a text, which encoding names."""
        for name in ("a", "b"):
            picture(tmp_path / f"{name}.png")
        (tmp_path / "a.txt").write_text("a tulip")
        assert read(tmp_path)["text"][:] == ["a tulip", None]

    def test_a_text_that_is_not_utf_8(self, tmp_path: Path) -> None:
        """Invariant 75."""
        picture(tmp_path / "a.png")
        (tmp_path / "a.txt").write_bytes("Blüte".encode("latin-1"))
        with pytest.raises(ConfigError, match="a.txt is not UTF-8"):
            read(tmp_path)

    def test_pictures_without_texts(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png")
        with pytest.raises(ConfigError, match="pictures of .* have no texts: .*metadata.jsonl.*\\.txt"):
            read(tmp_path)
        assert len(read(tmp_path, host="unet")) == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of Hugging Face on the disk."""
    folder = tmp_path_factory.mktemp("dataset")
    images = [Pictures.new("RGB", (7, 5), (20 * n, 0, 0)) for n in range(6)]
    content = {"caption": [f"picture {n}" for n in range(6)], "picture": images, "source": ["here"] * 6}
    features = Features({"caption": Value("string"), "picture": Image(), "source": Value("string")})
    Dataset.from_dict(content, features=features).save_to_disk(str(folder))
    return folder


class TestDatasets:
    COLUMNS = {"text": "caption", "image": "picture"}

    def test_columns(self, saved: Path) -> None:
        rows = read(saved, columns=self.COLUMNS)
        assert rows.column_names == ["text", "image"] and len(rows) == 6
        assert rows[2]["text"] == "picture 2" and mmattn.load_image(rows[2]["image"]).size == (7, 5)
        both = read(saved, columns={**self.COLUMNS, "example": "picture"}, host="unet")
        assert both.column_names == ["text", "image", "example"]
        for options, values in (
            ({}, "caption, picture, source.*nothing for"),
            ({"columns": {"text": "title"}}, "text=title"),
            ({"columns": {**self.COLUMNS, "label": "source"}}, "both a text and a label"),
            ({"columns": self.COLUMNS, "template": "{label}"}, "template"),
            ({"split": "test"}, "test"),
        ):
            with pytest.raises(ConfigError, match=values):
                read(saved, **options)

    def test_classes_and_splits(self, tmp_path: Path) -> None:
        """As the image datasets of the hub have them: a column of classes, and no texts."""
        images = [Pictures.new("RGB", (7, 5), (20 * n, 0, 0)) for n in range(4)]
        features = Features({"image": Image(), "label": ClassLabel(names=["daisy", "lily-valley"])})
        content = Dataset.from_dict({"image": images, "label": [0, 1, 1, 0]}, features=features)
        DatasetDict({"train": content, "validation": content.select(range(1))}).save_to_disk(str(tmp_path / "two"))
        splits = training.read_rows(tmp_path / "two", template="A {label}.")
        assert splits["train"]["text"][:] == ["A daisy.", "A lily valley.", "A lily valley.", "A daisy."]
        assert len(splits["validation"]) == 1

    def test_a_stream(self, saved: Path) -> None:
        rows = read(saved, columns=self.COLUMNS, streaming=True)
        kept, held_out = training.split_rows(rows, 2)
        assert [row["text"] for row in held_out] == ["picture 0", "picture 1"]
        want = [f"picture {n}" for n in range(2, 6)]
        assert [row["text"] for row in kept] == [row["text"] for row in kept] == want
        with pytest.raises(ConfigError, match="a stream has no length"):
            training.split_rows(rows, 0.1)

    def test_lance(self, tmp_path: Path) -> None:
        lance = pytest.importorskip("lance", reason="lance is not installed; it comes with mmattn[lance]")
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table({"caption": ["a", "b"], "photo": pyarrow.array([b"x", b"y"], pyarrow.large_binary())})
        lance.write_dataset(table, str(tmp_path / "data.lance"))
        rows = read(tmp_path / "data.lance", columns={"text": "caption", "image": "photo"})
        assert list(rows) == [{"text": "a", "image": b"x"}, {"text": "b", "image": b"y"}]


class TestSplit:
    def test_shares_and_numbers(self) -> None:
        rows = Dataset.from_dict({"text": [f"row {number}" for number in range(20)]})
        for asked, count in ((0.1, 2), (3, 3), (0.01, 1), (0, 0)):
            kept, held_out = training.split_rows(rows, asked, seed=1)
            assert len(held_out) == count and len(kept) == 20 - count
            assert {*kept["text"], *held_out["text"]} == set(rows["text"])
        seeds = [training.split_rows(rows, 3, seed)[1]["text"][:] for seed in (1, 1, 2)]
        assert seeds[0] == seeds[1] != seeds[2]
        with pytest.raises(ConfigError, match="leave none to train on"):
            training.split_rows(rows, 20)

    @pytest.mark.parametrize("kind", ["paths", "imagefolder", "encoded"])
    def test_a_picture_is_on_one_side(self, kind: str, tmp_path: Path) -> None:
        names = [f"{i % 4}.png" for i in range(20)]
        columns: dict[str, Any] = {"text": [f"caption {i}" for i in range(20)]}
        if kind == "imagefolder":
            for name in set(names):
                picture(tmp_path / name)
            file = [{"file_name": name, "text": text} for name, text in zip(names, columns["text"], strict=True)]
            lines(tmp_path / "metadata.jsonl", *file)
            rows = read(tmp_path)
        else:
            key = "image" if kind == "paths" else "sources"
            rows = Dataset.from_dict({**columns, key: names if kind == "paths" else [[name] for name in names]})
        for seed in range(5):
            kept, held_out = training.split_rows(rows, 1, seed)
            pictures = [{int(text.split()[1]) % 4 for text in part["text"]} for part in (kept, held_out)]
            assert pictures[0].isdisjoint(pictures[1]) and len(held_out) == 5


def tar(path: Path, samples: dict[str, dict[str, Any]], folder: str = "") -> Path:
    """A tar of samples: name: ending: content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as made:
        for key, files in samples.items():
            for ending, content in files.items():
                raw = json.dumps(content).encode() if isinstance(content, (dict, list)) else content
                raw = raw.encode() if isinstance(raw, str) else raw
                about = tarfile.TarInfo(f"{folder}{key}.{ending}")
                about.size = len(raw)
                made.addfile(about, io.BytesIO(raw))
    return path


class TestTars:
    @pytest.fixture
    def pictures(self, tmp_path: Path) -> list[bytes]:
        return [picture(tmp_path / "pictures" / f"{n}.png", n).read_bytes() for n in range(11)]

    @pytest.fixture
    def folder(self, tmp_path: Path, pictures: list[bytes]) -> Path:
        """Eleven samples in three tars."""
        samples = [{"png": pictures[n], "txt": f" text {n}\n", "json": {"caption": f"other {n}"}} for n in range(11)]
        for number, span in enumerate((range(0, 4), range(4, 5), range(5, 11))):
            tar(tmp_path / "tars" / f"part-{number:03d}.tar", {f"{n:04d}": samples[n] for n in span})
        return tmp_path / "tars"

    @pytest.mark.parametrize("streaming", [False, True])
    def test_rows(self, folder: Path, streaming: bool, pictures: list[bytes], tmp_path: Path) -> None:
        files = f"{folder}/part-*.tar"
        rows = list(read(files, streaming=streaming))
        assert [row["text"] for row in rows] == [f"text {n}" for n in range(11)]
        assert rows[4]["image"]["bytes"] == pictures[4]
        rows = list(read(files, columns={"text": "json.caption", "image": "png"}, streaming=streaming))
        assert rows[7]["text"] == "other 7"
        rows = list(read(files, columns={"label": "json.caption"}, template="A {label}.", streaming=streaming))
        assert rows[3] == {"text": "A other 3."}
        rows = list(read(files, columns={"label": "txt"}, template="It is {label}.", streaming=streaming))
        assert rows[2] == {"text": "It is text 2."}
        samples = {"a": {"webp": pictures[0], "json": {"caption": "one", "prompt": "Say:", "width": 3}}}
        (row,) = read(tar(tmp_path / "a.tar", samples, folder="deep/v1.0/"), streaming=streaming)
        assert (row["text"], row["prompt"], row["image"]["bytes"]) == ("one", "Say:", pictures[0])

    def test_damaged_tars(self, folder: Path, tmp_path: Path) -> None:
        whole = (folder / "part-002.tar").read_bytes()
        filled = len(whole.rstrip(b"\0"))
        with tarfile.open(folder / "part-002.tar") as opened:
            place = opened.getmembers()[4].offset
        damaged = [whole[: filled - 3000], whole[: filled - 10], whole[: place + 3] + b"?" + whole[place + 4 :]]
        for raw in (*damaged, b"nothing" * 300):
            (tmp_path / "bad.tar").write_bytes(raw)
            with pytest.raises(ConfigError, match=r"bad.tar'? (is truncated or damaged|cannot be read)"):
                read(tmp_path / "bad.tar")
        with pytest.raises(ConfigError, match="columns of .*image=jpg"):
            read(f"{folder}/*.tar", columns={"text": "txt", "image": "jpg"})
