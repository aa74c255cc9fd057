"""Reading an encoded dataset: rows by number, from a folder or an address, and files that are damaged."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import fsspec
import pytest
import torch

import mmattn
from mmattn import training
from mmattn.data.encoded_files import shard_name
from mmattn.data.row import Row
from mmattn.errors import AdapterFileError
from tests.data.encoded_rows import Eye, captions, encode_captions, flip, flip_byte

COLOURS = [1, 2, 1, 3, 4, 5, 6, 4, 7, 8, 1, 9, 10]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen rows in four shards, some of which refer to entries of other shards."""
    folder = tmp_path_factory.mktemp("made")
    captions(folder / "data", COLOURS)
    encode_captions(folder / "data", folder / "store", Eye())
    return folder


@pytest.fixture(scope="module")
def truth(made: Path) -> torch.Tensor:
    """The vectors (n, m, e) of each row."""
    return Eye()([str(made / "data" / f"{n}.png") for n in range(len(COLOURS))]).tokens.half()


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A store that may be damaged."""
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


class TestRows:
    def test_by_number(self, made: Path, truth: torch.Tensor) -> None:
        store = training.EncodedDataset(made / "store")
        assert repr(store) == "EncodedDataset(rows=13, e=5, float16, shards=3)"
        for number in (0, 12, 5, 2, 10, -1, -13):
            row = store[number]
            assert row.text.startswith(f"picture {number % 13}")
            assert row.memory.tokens.dtype == torch.float16 and torch.equal(row.memory.tokens[0], truth[number])
        for number in (13, -14):
            with pytest.raises(IndexError, match="of an encoded dataset with 13 rows"):
                _ = store[number]

    def test_some_of_them(self, made: Path, truth: torch.Tensor) -> None:
        store = training.EncodedDataset(made / "store")
        chosen = store.select([7, 2, 11, 2])
        assert [row.text.split()[1] for row in chosen] == ["7", "2", "11", "2"]
        assert [row.text for row in chosen[1:3]] == [store[2].text, store[11].text]
        assert torch.equal(chosen[2].memory.tokens[0], truth[11])
        assert len(store[5:]) == 8 and len(store) == 13
        assert len({one.sha256 for one in (store, chosen, store[5:], chosen[1:])}) == 4
        assert training.EncodedDataset(made / "store").select([7, 2, 11, 2]).sha256 == chosen.sha256
        with pytest.raises(IndexError, match="rows 2 to 13 of an encoded dataset"):
            store.select([2, 13])

    def test_in_another_process(self, made: Path, truth: torch.Tensor) -> None:
        """A store and a row are pickled: what `spawn`, Ray and data loaders do."""
        store = training.EncodedDataset(made / "store").select([4, 9])
        again = pickle.loads(pickle.dumps(store))
        assert torch.equal(again[1].memory.tokens[0], truth[9]) and len(again) == 2
        row = pickle.loads(pickle.dumps(store[0]))
        assert row.text == store[0].text and row.files == store[0].files and row.contents == store[0].contents
        assert torch.equal(row.memory.tokens[0], truth[4])

    def test_a_row_is_like_any_other(self, made: Path) -> None:
        from dataclasses import replace

        row = training.EncodedDataset(made / "store")[3]
        assert isinstance(row, Row) and not row.images and not row.passages and row.picture is None
        other = replace(row, text="other")
        assert other.text == "other" and torch.equal(other.memory.tokens, row.memory.tokens)


class TestAddresses:
    @pytest.mark.parametrize("scheme", ["file", "memory"])
    def test_the_same_rows(self, scheme: str, made: Path, truth: torch.Tensor) -> None:
        address = f"file://{made / 'store'}"
        if scheme == "memory":
            address = "memory://bucket/store"
            system = fsspec.filesystem("memory")
            for path in (made / "store").iterdir():
                system.pipe(f"/bucket/store/{path.name}", path.read_bytes())
        store = training.EncodedDataset(address)
        assert store.folder.is_local == (scheme == "file")
        for number in (12, 0, 10, 4):
            assert torch.equal(store[number].memory.tokens[0], truth[number])
        rows = [row for batch in training.EncodedBatches(store, 3, seed=5).epoch(0) for row in batch]
        assert sorted(int(row.text.split()[1]) for row in rows) == list(range(13))
        for row in rows:
            assert torch.equal(row.memory.tokens[0], truth[int(row.text.split()[1])])

    def test_a_damaged_one(self, copied: Path) -> None:
        """Invariant 111."""
        system = fsspec.filesystem("memory")
        flip(copied, 1, 0)
        for path in copied.iterdir():
            system.pipe(f"/damaged/{path.name}", path.read_bytes())
        with pytest.raises(AdapterFileError, match=r"vectors-000001.arrow' was changed"):
            _ = training.EncodedDataset("memory://damaged")[6].memory
        system.rm(f"/damaged/{shard_name(2)}")
        with pytest.raises(AdapterFileError, match="/damaged/vectors-000002.arrow' is missing"):
            training.EncodedDataset("memory://damaged")


class TestDamage:
    def test_a_flipped_bit_is_found(self, copied: Path) -> None:
        """Invariant 111: by whoever reads the vectors first; the others are as they were."""
        flip(copied, 1, 1)
        store = training.EncodedDataset(copied)
        first, second = store.manifest.shards[0].contents, store.manifest.shards[0].contents + 3
        rows = {row.contents[0]: row for row in store}
        assert rows[first].memory.length == 6
        with pytest.raises(AdapterFileError, match=r"block .* in .*vectors-000001.arrow' was changed after"):
            _ = rows[second].memory
        with pytest.raises(AdapterFileError, match=r"block .* in .*vectors-000001.arrow' was changed after"):
            for batch in training.EncodedBatches(store, 2).epoch(0):
                assert batch

    def test_a_flipped_bit_of_the_rows_is_found(self, copied: Path) -> None:
        """Invariant 111: when the dataset is opened."""
        flip_byte(copied / "rows-000.arrow", 1500)
        with pytest.raises(AdapterFileError, match=r"rows-000.arrow' was changed after"):
            training.EncodedDataset(copied)

    def test_a_missing_shard_is_named(self, copied: Path) -> None:
        """Invariant 111."""
        (copied / shard_name(2)).unlink()
        with pytest.raises(
            AdapterFileError, match=r"vectors-000002.arrow' is missing, and encoded.json says [\d,]+ by"
        ):
            training.EncodedDataset(copied)

    def test_a_shard_of_another_store(self, copied: Path, made: Path, tmp_path: Path) -> None:
        """Invariant 111: of the same size, whole, and yet not the one that was written."""
        encode_captions(made / "data", tmp_path / "other", Eye(seed=1))
        shutil.copy(tmp_path / "other" / shard_name(0), copied / shard_name(0))
        store = training.EncodedDataset(copied)
        with pytest.raises(AdapterFileError, match="block 0 in .*of another dataset"):
            _ = store[0].memory


class TestMemories:
    def test_as_a_collator_asks_for_them(self, made: Path, truth: torch.Tensor) -> None:
        store = training.EncodedDataset(made / "store")
        batch = store.of([store[2], store[11]])
        assert batch is not None and torch.equal(batch.tokens, truth[[2, 11]].float())
        assert Eye().fingerprint == store.fingerprint and store.dim == 5
        assert store.of([Row("no memory")]) is None
        mixed = store.of([store[1], Row("no memory"), Row("own", memory=mmattn.Memory(torch.ones(1, 2, 5)))])
        assert mixed is not None and mixed.lengths == [6, 0, 2] and not mixed.tokens[1].any()
