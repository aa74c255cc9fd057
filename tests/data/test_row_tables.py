"""Rows of webdataset tars, of Lance datasets and of streams: read, encoded, and refused where they are damaged."""

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

datasets = pytest.importorskip("datasets", reason="datasets is not installed; it comes with mmattn[train]")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


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
def pictures(tmp_path: Path) -> list[bytes]:
    """Files of eleven pictures."""
    return [picture(tmp_path / "pictures" / f"{n}.png", n).read_bytes() for n in range(11)]


@pytest.fixture
def folder(tmp_path: Path, pictures: list[bytes]) -> Path:
    """Eleven samples in three tars."""
    samples = [{"png": pictures[n], "txt": f" text {n}\n", "json": {"caption": f"other {n}"}} for n in range(11)]
    for number, span in enumerate((range(0, 4), range(4, 5), range(5, 11))):
        tar(tmp_path / "tars" / f"part-{number:03d}.tar", {f"{n:04d}": samples[n] for n in span})
    return tmp_path / "tars"


class TestTars:
    @pytest.mark.parametrize("pattern", ["", "part-{000..002}.tar", "part-*.tar"])
    def test_rows(self, folder: Path, pattern: str, pictures: list[bytes]) -> None:
        rows = training.read_rows(str(folder / pattern))
        assert rows.summary == "11 rows of a dataset (image=png, text=txt)"
        assert [row.text for row in rows] == [f"text {n}" for n in range(11)]
        assert [row.text for row in rows.select([9, 2])] == ["text 9", "text 2"]
        assert rows[4].images == (pictures[4],) and rows.text_lengths() == [len(row.text) for row in rows]
        stream = training.read_rows(str(folder / pattern), streaming=True)
        assert [row.text for row in stream] == [row.text for row in rows]

    def test_columns(self, folder: Path, tmp_path: Path, pictures: list[bytes]) -> None:
        rows = training.read_rows(str(folder), columns={"text": "json.caption", "image": "png"})
        assert rows[7].text == "other 7" and len(rows[7].images) == 1
        assert rows.text_lengths() == [len(row.text) for row in rows]
        rows = training.read_rows(str(folder), columns={"label": "txt"}, template="It is {label}.")
        assert rows[2].text == "It is text 2." and not rows[2].images
        with pytest.raises(ConfigError, match=r"are png, txt, json, .*image=jpg does not fit"):
            training.read_rows(str(folder), columns={"text": "txt", "image": "jpg"})
        with pytest.raises(ConfigError, match="split only applies to"):
            training.read_rows(str(folder), split="train")
        samples = {"a": {"webp": pictures[0], "json": {"caption": "one", "prompt": "Say:", "width": 3}}}
        (row,) = training.read_rows(str(tar(tmp_path / "a.tar", samples, folder="deep/v1.0/")))
        assert (row.text, row.prompt, row.images) == ("one", "Say:", (pictures[0],))

    def test_it_is_encoded(self, folder: Path, pictures: list[bytes], tmp_path: Path) -> None:
        """A picture that cannot be read is left out and named."""
        tar(folder / "part-003.tar", {"0011": {"png": pictures[2][:40], "txt": "cut", "json": {}}})
        rows = training.read_rows(str(folder))
        store = training.encode_rows(rows, tmp_path / "store", pictures=Eye(), contents_per_shard=4, source="tars")
        want = Eye()(pictures).tokens.half()
        assert all(torch.equal(row.memory.tokens[0], one) for row, one in zip(store, want, strict=True))
        assert [line.split(":")[0] for line in store.left_out] == ["row 11 of tars"]

    def test_damaged_tars(self, folder: Path, tmp_path: Path) -> None:
        whole = (folder / "part-002.tar").read_bytes()
        filled = len(whole.rstrip(b"\0"))
        with tarfile.open(folder / "part-002.tar") as read:
            place = read.getmembers()[4].offset
        damaged = [whole[: filled - 3000], whole[: filled - 10], whole[: place + 3] + b"?" + whole[place + 4 :]]
        for raw in (*damaged, b"nothing" * 300):
            (tmp_path / "bad.tar").write_bytes(raw)
            with pytest.raises(ConfigError, match=r"bad.tar'? (is truncated or damaged|cannot be read as tars)"):
                training.read_rows(str(tmp_path / "bad.tar"))
        with pytest.raises(ConfigError, match=r"there is no file .*part-003.tar \(2 of the 5 that"):
            training.read_rows(str(folder / "part-{000..004}.tar"))


def test_a_lance_dataset(tmp_path: Path, pictures: list[bytes]) -> None:
    lance = pytest.importorskip("lance", reason="lance is not installed; it comes with mmattn[lance]")
    pyarrow = pytest.importorskip("pyarrow")
    photos = pyarrow.array(pictures, pyarrow.large_binary())
    table = pyarrow.table({"caption": [f"text {n}" for n in range(11)], "photo": photos})
    lance.write_dataset(table, str(tmp_path / "data.lance"))
    rows = training.read_rows(str(tmp_path / "data.lance"), columns={"text": "caption", "image": "photo"})
    assert [row.text for row in rows] == [f"text {n}" for n in range(11)]
    assert rows[-1].images == (pictures[10],)
    with pytest.raises(ConfigError, match="are caption, photo, and .*nothing for text does not fit"):
        training.read_rows(str(tmp_path / "data.lance"))


class TestStreams:
    def test_a_stream_is_encoded(self, tmp_path: Path) -> None:
        """Rows that cannot be used are named."""
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
