"""Rows of webdataset tars and of Lance datasets: found, read by number, encoded, and refused where they are damaged."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import training
from mmattn.errors import ConfigError
from tests.data.encoded_rows import Eye, picture


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


@pytest.fixture
def shown(tmp_path: Path) -> list[bytes]:
    """Files of eleven pictures."""
    return [picture(tmp_path / "shown" / f"{n}.png", n).read_bytes() for n in range(11)]


@pytest.fixture
def folder(tmp_path: Path, shown: list[bytes]) -> Path:
    """Eleven samples in three tars."""
    samples = {
        f"{n:04d}": {"png": shown[n], "txt": f" text {n}\n", "json": {"caption": f"other {n}"}} for n in range(11)
    }
    names = list(samples)
    for number, span in enumerate((range(0, 4), range(4, 5), range(5, 11))):
        tar(tmp_path / "tars" / f"part-{number:03d}.tar", {names[i]: samples[names[i]] for i in span})
    return tmp_path / "tars"


class TestTars:
    def test_rows_by_number(self, folder: Path, shown: list[bytes]) -> None:
        rows = training.read_rows(str(folder))
        assert rows.summary == "11 rows of webdataset tars (image=png, text=txt)"
        for number in (0, 10, 4, 3, 5, -1):
            assert rows[number].text == f"text {number % 11}" and rows[number].images == (shown[number],)
        assert [row.text for row in rows[3:6]] == ["text 3", "text 4", "text 5"]
        assert [row.text for row in rows.select([9, 2])] == ["text 9", "text 2"]
        assert rows.text_lengths() == [len(f"text {n}") for n in range(11)]
        with pytest.raises(IndexError):
            _ = rows[11]

    @pytest.mark.parametrize(
        "pattern", ["part-{000..002}.tar", "part-*.tar", "part-{000,001,002}.tar", "part-00{0..2}.tar"]
    )
    def test_patterns(self, folder: Path, pattern: str) -> None:
        rows = training.read_rows(str(folder / pattern))
        assert [row.text for row in rows] == [f"text {n}" for n in range(11)]

    def test_one_tar_and_what_is_missing(self, folder: Path) -> None:
        assert len(training.read_rows(str(folder / "part-002.tar"))) == 6
        with pytest.raises(ConfigError, match=r"there is no file .*part-003.tar \(2 of the 5 that"):
            training.read_rows(str(folder / "part-{000..004}.tar"))

    def test_columns(self, folder: Path) -> None:
        rows = training.read_rows(str(folder), columns={"text": "json.caption", "image": "jpg;png"})
        assert rows[7].text == "other 7" and len(rows[7].images) == 1
        rows = training.read_rows(str(folder), columns={"label": "txt"}, template="It is {label}.")
        assert rows[2].text == "It is text 2." and not rows[2].images
        with pytest.raises(ConfigError, match=r"are png, txt, json, json.caption, and .*image=jpg does not fit"):
            training.read_rows(str(folder), columns={"text": "txt", "image": "jpg"})
        with pytest.raises(ConfigError, match="split only applies to"):
            training.read_rows(str(folder), split="train")

    def test_captions_in_json_and_pictures_of_two_kinds(self, tmp_path: Path, shown: list[bytes]) -> None:
        samples = {
            "a": {"png": shown[0], "json": {"caption": "one", "prompt": "Say:", "width": 3}},
            "b": {"webp": shown[1], "json": {"caption": "two", "prompt": ""}},
            "c": {"json": {"caption": "three"}},
        }
        rows = training.read_rows(str(tar(tmp_path / "a.tar", samples, folder="deep/v1.0/")))
        assert [(row.text, row.prompt, len(row.images)) for row in rows] == [
            ("one", "Say:", 1),
            ("two", "", 1),
            ("three", "", 0),
        ]

    def test_it_is_encoded(self, folder: Path, shown: list[bytes], tmp_path: Path) -> None:
        rows = training.read_rows(str(folder))
        store = training.encode_rows(rows, tmp_path / "store", pictures=Eye(), contents_per_shard=4)
        assert [row.text for row in store] == [f"text {n}" for n in range(11)]
        want = Eye()(shown).tokens.half()
        assert all(torch.equal(row.memory.tokens[0], one) for row, one in zip(store, want, strict=True))
        assert len(training.encode_rows(training.read_rows(str(folder)), tmp_path / "store", pictures=Eye())) == 11

    def test_a_sample_that_cannot_be_used(self, tmp_path: Path, shown: list[bytes]) -> None:
        samples = {
            "a": {"png": shown[0], "txt": "one"},
            "b": {"png": shown[1]},
            "c": {"png": shown[2][:40], "txt": "three"},
            "d": {"png": shown[3], "txt": b"\xff\xfe"},
            "e": {"png": shown[4], "txt": "five"},
        }
        rows = training.read_rows(str(tar(tmp_path / "a.tar", samples)))
        with pytest.raises(ConfigError, match="row 1 of the dataset: 'text' is missing"):
            _ = rows[1]
        store = training.encode_rows(rows, tmp_path / "store", pictures=Eye(), source="a.tar")
        assert [row.text for row in store] == ["one", "five"]
        assert [line.split(":")[0] for line in store.left_out] == [
            "row 1 of the dataset",
            "row 2 of a.tar",
            "row 3 of the dataset",
        ]

    def test_damaged_tars(self, folder: Path, tmp_path: Path) -> None:
        whole = (folder / "part-002.tar").read_bytes()
        filled = len(whole.rstrip(b"\0"))
        for length in (filled - 3000, filled - 700, filled - 10):
            (tmp_path / "short.tar").write_bytes(whole[:length])
            with pytest.raises(ConfigError, match="short.tar (is truncated or damaged|cannot be read)"):
                training.read_rows(str(tmp_path / "short.tar"))
        with tarfile.open(folder / "part-002.tar") as read:
            place = read.getmembers()[4].offset
        (tmp_path / "flipped.tar").write_bytes(whole[: place + 3] + b"?" + whole[place + 4 :])
        with pytest.raises(ConfigError, match=rf"flipped.tar is truncated or damaged after its byte {place:,} \(after"):
            training.read_rows(str(tmp_path / "flipped.tar"))
        (tmp_path / "none.tar").write_bytes(b"nothing" * 300)
        with pytest.raises(ConfigError, match="none.tar cannot be read as a tar that is not compressed"):
            training.read_rows(str(tmp_path / "none.tar"))
        with pytest.raises(ConfigError, match="holds no samples"):
            training.read_rows(str(tar(tmp_path / "empty.tar", {})))
        with pytest.raises(ConfigError, match="has two files a.txt in one sample"):
            training.read_rows(str(tar(tmp_path / "twice.tar", {"a": {"txt": "one", "TXT": "two"}})))

    def test_a_folder_of_pictures_stays_one(self, tmp_path: Path, shown: list[bytes]) -> None:
        for label in ("daisy", "poppy"):
            picture(tmp_path / "data" / label / "1.png")
        tar(tmp_path / "data" / "all.tar", {"a": {"png": shown[0], "txt": "one"}})
        assert training.read_rows(str(tmp_path / "data")).summary == "2 pictures in 2 class folders"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its reader leaves files open
    def test_what_webdataset_writes(self, tmp_path: Path, shown: list[bytes]) -> None:
        """Its own writer, and its own reader for comparison."""
        webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
        with webdataset.ShardWriter(str(tmp_path / "w-%03d.tar"), maxcount=3, verbose=0) as writer:
            for n in range(7):
                sample = {"__key__": f"a/b.c/{n:04d}", "png": shown[n], "txt": f"text {n}", "json": {"caption": "c"}}
                writer.write(sample)
        rows = training.read_rows(str(tmp_path / "w-{000..002}.tar"))
        names = sorted(map(str, tmp_path.glob("w-*.tar")))
        own = list(webdataset.WebDataset(names, shardshuffle=False))
        assert len(rows) == len(own) == 7
        for row, sample in zip(rows, own, strict=True):
            assert (row.text, row.images) == (sample["txt"].decode(), (sample["png"],))


class TestLance:
    @pytest.fixture
    def path(self, tmp_path: Path, shown: list[bytes]) -> Path:
        lance = pytest.importorskip("lance", reason="lance is not installed; it comes with mmattn[lance]")
        pyarrow = pytest.importorskip("pyarrow")
        pictures = pyarrow.array(shown, pyarrow.large_binary())
        table = pyarrow.table({"caption": [f"text {n}" for n in range(11)], "photo": pictures, "other": range(11)})
        lance.write_dataset(table, str(tmp_path / "data.lance"))
        return tmp_path / "data.lance"

    def test_rows_by_number(self, path: Path, shown: list[bytes]) -> None:
        rows = training.read_rows(str(path), columns={"text": "caption", "image": "photo"})
        assert rows.summary == "11 rows of a Lance dataset (text=caption, image=photo)"
        assert [row.text for row in rows] == [f"text {n}" for n in range(11)]
        assert rows[-1].images == (shown[10],) and [row.text for row in rows.select([4, 1])] == ["text 4", "text 1"]
        assert rows.text_lengths() == [len(f"text {n}") for n in range(11)]
        with pytest.raises(ConfigError, match="are caption, photo, other, and .*nothing for text does not fit"):
            training.read_rows(str(path))

    def test_it_is_encoded(self, path: Path, shown: list[bytes], tmp_path: Path) -> None:
        rows = training.read_rows(str(path), columns={"text": "caption", "image": "photo"})
        store = training.encode_rows(rows, tmp_path / "store", pictures=Eye(), contents_per_shard=4)
        want = Eye()(shown).tokens.half()
        assert all(torch.equal(row.memory.tokens[0], one) for row, one in zip(store, want, strict=True))

    def test_no_dataset(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read as a Lance dataset"):
            training.read_rows(str(tmp_path / "gone.lance"))


class TestStreams:
    def test_a_stream_is_encoded(self, tmp_path: Path) -> None:
        """Rows that cannot be used are named."""
        datasets = pytest.importorskip("datasets", reason="datasets is not installed; it comes with mmattn[train]")
        paths = [str(picture(tmp_path / "shown" / f"{n}.png", n % 3)) for n in range(11)]
        texts = [f"text {n}" if n != 6 else "" for n in range(11)]
        data = datasets.Dataset.from_dict({"text": texts, "image": paths})
        data.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "data")
        rows = training.read_rows(str(tmp_path / "data"), streaming=True)
        store = training.encode_rows(rows, tmp_path / "store", pictures=Eye(), contents_per_shard=4)
        assert [row.text for row in store] == [text for text in texts if text]
        assert [line[:22] for line in store.left_out] == ["row 6 of the dataset: "]
        assert [one.contents for one in store.manifest.shards] == [3]
        want = Eye()([path for path, text in zip(paths, texts, strict=True) if text]).tokens.half()
        assert all(torch.equal(row.memory.tokens[0], one) for row, one in zip(store, want, strict=True))
        again = training.read_rows(str(tmp_path / "data"), streaming=True)
        assert len(training.encode_rows(again, tmp_path / "store", pictures=Eye())) == 10
        with pytest.raises(ConfigError, match="row 6 of the dataset"):
            training.encode_rows(again, tmp_path / "strict", pictures=Eye(), strict=True)

    def test_a_stream_goes_on(self, tmp_path: Path) -> None:
        """What was there of the shards stays, and the others are made."""
        datasets = pytest.importorskip("datasets", reason="datasets is not installed; it comes with mmattn[train]")
        texts = [f"text {n}" for n in range(8)]
        paths = [str(picture(tmp_path / "shown" / f"{n}.png", n)) for n in range(8)]
        data = datasets.Dataset.from_dict({"text": texts, "image": paths})
        data.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "data")

        class Failing(Eye):
            def forward(self, images: Any, **options: Any) -> Any:
                if self.calls == 2:
                    raise RuntimeError("at the third")
                return super().forward(images, **options)

        def encode(eye: Eye) -> training.EncodedDataset:
            rows = training.read_rows(str(tmp_path / "data"), streaming=True)
            return training.encode_rows(rows, tmp_path / "store", pictures=eye, contents_per_shard=2)

        with pytest.raises(RuntimeError, match="at the third"):
            encode(Failing())
        first = tmp_path / "store" / "vectors-000000.arrow"
        before = first.stat().st_mtime_ns
        eye = Eye(log=tmp_path / "log")
        assert [row.text for row in encode(eye)] == texts
        assert (tmp_path / "log").read_text().split() == ["2", "2"] and first.stat().st_mtime_ns == before
