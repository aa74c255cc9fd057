"""Encoding rows into a store: what comes back, what is encoded once, what is left out, what goes on after a kill."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import training
from mmattn.data import encode_plan
from mmattn.data.row import Row
from mmattn.encoders import TextEncoder
from mmattn.errors import ConditionError, ConfigError, ImageError
from mmattn.storage.files import lock_folder
from tests.data.encoded_rows import (
    EYE_SLOTS,
    Eye,
    captions,
    contents,
    encode_captions,
    encoded,
    picture,
    start,
)
from tests.tiny_texts import WIDTH, save_encoder


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    torch.manual_seed(13)
    return TextEncoder(save_encoder(tmp_path_factory.mktemp("encoder")), pooling="none")


def of_everything(folder: Path) -> list[Row]:
    """Rows with every kind of memory, and none."""
    one, two = (str(picture(folder / f"{n}.png", n)) for n in (1, 2))
    padded = mmattn.Memory(
        torch.randn(1, 4, 7),
        mask=torch.tensor([[True, False, True, True]]),
        segments=torch.tensor([[0, 0, 2, 1]]),
        scores=torch.tensor([[0.5, 9.0, -1.5, 2.0]]),
    )
    saved = folder / "saved.safetensors"
    mmattn.Memory(torch.randn(1, 3, WIDTH)).save(saved)
    return [
        Row("a picture", images=(one,)),
        Row("no memory at all"),
        Row("two of them", prompt="Say:", images=(two, one)),
        Row("words", passages=("the bluebell", "flowers in spring")),
        Row("both", images=(two,), passages=("the bluebell",)),
        Row("its own", memory=str(saved)),
        Row("its own with everything", memory=padded),
        Row("all", images=(one,), passages=("woods",), memory=padded),
        Row("bytes", images=(Path(two).read_bytes(),)),
    ]


class TestWhatComesBack:
    @pytest.mark.parametrize("contents_per_shard", [1, 2, 50])
    def test_rows_and_memories(self, contents_per_shard: int, reader: TextEncoder, tmp_path: Path) -> None:
        """Invariant 110, in half precision."""
        rows, eye = of_everything(tmp_path), Eye()
        store = training.encode_rows(
            rows,
            tmp_path / "store",
            pictures=eye,
            passages=reader,
            contents_per_shard=contents_per_shard,
            block_bytes=100,
        )
        assert (len(store), store.dim) == (len(rows), WIDTH)
        assert [(row.text, row.prompt) for row in store] == [(row.text, row.prompt) for row in rows]
        assert [row.has_memory for row in store] == [row.has_memory for row in rows]
        own = training.RowMemories(tmp_path / "cache", pictures=eye, passages=reader)
        stored = training.RowMemories(tmp_path / "cache", dim=store.dim)
        assert store.fingerprint == own.fingerprint
        for given, found in zip(rows, store, strict=True):
            want, have = own.of([given]), stored.of([found])
            if want is None:
                assert have is None
                continue
            assert have is not None
            mask = want.real_slots()[0]
            assert torch.equal(have.tokens[0], want.tokens[0, mask].half().float())
            assert torch.equal(have.segments[0], want.segments[0, mask])
            assert (want.scores is None) == (have.scores is None)
            assert want.scores is None or torch.equal(have.scores[0], want.scores[0, mask])

    def test_the_manifest_describes_the_dataset(self, reader: TextEncoder, tmp_path: Path) -> None:
        eye = Eye(pooled=True)
        names = {"pictures": "tiny:eye"}
        rows = of_everything(tmp_path)
        store = training.encode_rows(
            rows, tmp_path / "store", pictures=eye, passages=reader, encoder_names=names, source="everything"
        )
        seen = store.encoders["pictures"]
        assert (seen.name, seen.pooled, seen.grid, seen.fingerprint) == ("tiny:eye", True, (1, 1), eye.fingerprint)
        assert store.encoders["passages"].pooling == "none" and store.manifest.saved_memories
        assert [(one.name, one.rows, one.total) for one in store.manifest.sources] == [("everything", 9, 9)]
        assert store[0].files == (str(tmp_path / "1.png"),) and store[0].memory.length == 1
        assert "9 encoded rows (pictures by tiny:eye, passages by" in store.summary
        assert sorted(contents(tmp_path / "store")) == ["encoded.json", "rows-000.arrow", "vectors-000000.arrow"]


class TestDtypes:
    @pytest.mark.parametrize(("dtype", "bound"), [("float16", 4e-4), ("bfloat16", 3e-3), ("int8", 1e-2)])
    def test_the_error_is_what_was_lost(self, dtype: str, bound: float, tmp_path: Path) -> None:
        """Invariant 110: the norm of what was lost for each unit of the norm of the vectors."""
        rows = [Row(f"row {n}", memory=mmattn.Memory(torch.randn(1, 3 + n % 5, 11) * 10**n)) for n in range(5)]
        store = training.encode_rows(rows, tmp_path / "store", dtype=dtype, contents_per_shard=2)
        lost = whole = 0.0
        for given, found in zip(rows, store, strict=True):
            assert torch.isfinite(found.memory.tokens).all()
            lost += float((found.memory.tokens.double() - given.memory.tokens).square().sum())
            whole += float(given.memory.tokens.double().square().sum())
        assert store.manifest.relative_error == pytest.approx((lost / whole) ** 0.5, rel=1e-6)
        assert bound / 30 < store.manifest.relative_error < bound

    def test_what_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        rows = [Row("row", memory=mmattn.Memory(torch.full((1, 2, 3), 1e5)))]
        with pytest.raises(ConfigError, match=r"vectors of up to 1e\+05 do not fit into float16.*bfloat16"):
            training.encode_rows(rows, tmp_path / "store")
        with pytest.raises(ConfigError, match="dtype must be one of"):
            training.encode_rows(rows, tmp_path / "store", dtype="float64")


class TestOnce:
    def test_a_content_is_encoded_once(self, tmp_path: Path) -> None:
        """The same picture in other files and other shards is stored where it came first."""
        colours = [1, 2, 1, 3, 3, 1, 4, 2, 5]
        captions(tmp_path / "data", colours)
        log = tmp_path / "log"
        store = encode_captions(tmp_path / "data", tmp_path / "store", Eye(log))
        assert encoded(log) == 5
        slots = sum(block.slots for shard in store.manifest.shards for block in shard.blocks)
        assert slots == 5 * EYE_SLOTS
        whole = Eye()([str(tmp_path / "data" / f"{n}.png") for n in range(9)])
        for row, want in zip(store, whole.tokens.half(), strict=True):
            assert torch.equal(row.memory.tokens[0], want)
        assert store[2].contents == store[0].contents and store[3].contents == store[4].contents

    def test_a_finished_one_does_nothing(self, tmp_path: Path) -> None:
        captions(tmp_path / "data", [1, 2, 3])
        encode_captions(tmp_path / "data", tmp_path / "store", Eye())
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
        log = tmp_path / "log"
        again = encode_captions(tmp_path / "data", tmp_path / "store", Eye(log), batch_size=2)
        assert len(again) == 3 and not log.exists()
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == times


class TestLeftOut:
    def broken(self, folder: Path) -> Path:
        """Nine rows, of which the third and its copy in another shard cannot be read."""
        captions(folder, [1, 2, 0, 3, 4, 5, 0, 6, 7])
        for number in (2, 6):
            (folder / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing else")
        return folder

    def test_broken_pictures_are_named(self, tmp_path: Path) -> None:
        store = encode_captions(self.broken(tmp_path / "data"), tmp_path / "store", Eye())
        assert [row.text.split()[1] for row in store] == list("0134578")
        assert len(store.left_out) == 2
        assert all(f"{n}.png" in line for n, line in zip((2, 6), store.left_out, strict=True))
        whole = Eye()([str(tmp_path / "data" / f"{n}.png") for n in (0, 1, 3, 4, 5, 7, 8)])
        assert all(torch.equal(a.memory.tokens[0], b) for a, b in zip(store, whole.tokens.half(), strict=True))

    def test_strict_refuses_them(self, tmp_path: Path) -> None:
        with pytest.raises(ImageError, match=r"2\.png.*strict=True"):
            encode_captions(self.broken(tmp_path / "data"), tmp_path / "store", Eye(), strict=True)

    def test_nothing_left_is_an_error_and_leaves_nothing(self, tmp_path: Path) -> None:
        rows = [Row("bad", images=(b"none",)), Row("bad too", images=(b"no",))]
        with pytest.raises(ConfigError, match="nothing of rows can be used:\n  row 0 of rows: "):
            training.encode_rows(rows, tmp_path / "store", pictures=Eye())
        assert contents(tmp_path / "store") == {}


class TestGoingOn:
    @pytest.mark.parametrize("kill", [3, *(pytest.param(kill, marks=pytest.mark.slow) for kill in (2, 4))])
    def test_killed_it_goes_on_to_the_same_bytes(self, kill: int, tmp_path: Path) -> None:
        """Invariant 109: no entry twice, and none encoded again but those of the shard in work."""
        captions(tmp_path / "data", [1, 2, 1, 3, 4, 5, 6, 4, 7, 8, 1, 9, 10])
        whole = encode_captions(tmp_path / "data", tmp_path / "whole", Eye())
        done = start(tmp_path / "data", tmp_path / "store", tmp_path / "log", kill)
        assert done.returncode == -signal.SIGKILL, done.stderr
        there = contents(tmp_path / "store")
        assert "encoded.json" not in there and "encoding/plan.json" in there
        with pytest.raises(ConditionError, match="not complete yet"):
            training.EncodedDataset(tmp_path / "store")
        shards = [name for name in there if name.startswith("vectors-")]
        seen = encoded(tmp_path / "log")
        encode_captions(tmp_path / "data", tmp_path / "store", Eye(tmp_path / "log"))
        found = contents(tmp_path / "store")
        assert found == contents(tmp_path / "whole")
        assert all(found[name] == there[name] for name in shards)
        assert whole.manifest.contents == 10 and encoded(tmp_path / "log") - seen <= 10

    def test_a_torn_shard_is_made_anew(self, tmp_path: Path) -> None:
        captions(tmp_path / "data", [1, 2, 3, 4, 5, 6, 7])
        encode_captions(tmp_path / "data", tmp_path / "whole", Eye())
        with pytest.raises(RuntimeError, match="at the third"):
            encode_captions(tmp_path / "data", tmp_path / "store", Failing())
        first = tmp_path / "store" / "vectors-000000.arrow"
        first.write_bytes(first.read_bytes()[:-9])
        encode_captions(tmp_path / "data", tmp_path / "store", Eye())
        assert contents(tmp_path / "store") == contents(tmp_path / "whole")

    def test_another_process_at_work_is_left_alone(self, tmp_path: Path) -> None:
        captions(tmp_path / "data", [1, 2, 3])
        (tmp_path / "store").mkdir()
        with lock_folder(tmp_path / "store"), pytest.raises(ConfigError, match="another process is encoding into"):
            encode_captions(tmp_path / "data", tmp_path / "store", Eye())

    def test_a_picture_that_changes_meanwhile_is_noticed(self, tmp_path: Path) -> None:
        captions(tmp_path / "data", [1, 2, 3, 4, 5, 6])

        class Changing(Eye):
            def forward(self, images: Any, **options: Any) -> Any:
                if self.calls == 1:
                    size = (tmp_path / "data" / "5.png").stat().st_size
                    picture(tmp_path / "data" / "5.png", 77)
                    assert (tmp_path / "data" / "5.png").stat().st_size == size
                return super().forward(images, **options)

        with pytest.raises(ConfigError, match=r"5\.png was changed while captions was encoded"):
            encode_captions(tmp_path / "data", tmp_path / "store", Changing())


class Failing(Eye):
    """Fails at its third batch."""

    def forward(self, images: Any, **options: Any) -> Any:
        if self.calls == 2:
            raise RuntimeError("at the third")
        return super().forward(images, **options)


class TestMoreRows:
    def test_added_rows_share_what_is_there(self, tmp_path: Path) -> None:
        captions(tmp_path / "one", [1, 2, 3, 4, 5])
        captions(tmp_path / "two", [6, 2, 7, 6, 1, 8])
        before = encode_captions(tmp_path / "one", tmp_path / "store", Eye(), source="one")
        log = tmp_path / "log"
        store = encode_captions(tmp_path / "two", tmp_path / "store", Eye(log), source="two", append=True)
        assert encoded(log) == 3
        assert [len(before), len(store)] == [5, 11]
        assert [one.name for one in store.manifest.sources] == ["one", "two"]
        paths = [tmp_path / "one" / f"{n}.png" for n in range(5)] + [tmp_path / "two" / f"{n}.png" for n in range(6)]
        for row, want in zip(store, Eye()(list(map(str, paths))).tokens.half(), strict=True):
            assert torch.equal(row.memory.tokens[0], want)
        assert [store[6].contents, store[8].contents] == [store[1].contents, store[5].contents]
        again = encode_captions(tmp_path / "two", tmp_path / "store", Eye(), source="two", append=True)
        assert len(again) == 11

    def test_until_it_is_whole_the_store_is_what_it_was(self, tmp_path: Path) -> None:
        """Invariant 109."""
        captions(tmp_path / "one", [1, 2, 3])
        captions(tmp_path / "two", [4, 5, 6, 7, 8, 9])
        encode_captions(tmp_path / "one", tmp_path / "store", Eye(), source="one")
        with pytest.raises(RuntimeError, match="at the third"):
            encode_captions(tmp_path / "two", tmp_path / "store", Failing(), source="two", append=True)
        assert [row.text.split()[1] for row in training.EncodedDataset(tmp_path / "store")] == list("012")
        with pytest.raises(ConfigError, match="was begun with two"):
            captions(tmp_path / "three", [1])
            encode_captions(tmp_path / "three", tmp_path / "store", Eye(), source="three", append=True)
        store = encode_captions(tmp_path / "two", tmp_path / "store", Eye(), source="two", append=True)
        assert len(store) == 9

    def test_killed_while_it_cleaned_up(self, tmp_path: Path) -> None:
        data, out = captions(tmp_path / "data", [1, 2, 3]), tmp_path / "store"
        encode_captions(data, out, Eye())
        whole = contents(out)
        (out / "encoding").mkdir()
        (out / "encoding" / "rows.arrow").write_bytes(b"of a plan that is gone")
        encode_captions(data, out, Eye())
        assert contents(out) == whole and not (out / "encoding").exists()

    def test_killed_when_all_was_done(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is left of the plan goes with the next call, for the same rows or for others."""
        captions(tmp_path / "one", [1, 2, 3])
        captions(tmp_path / "two", [4, 5])
        for name, options in (("one", {}), ("two", {"append": True})):

            def killed(folder: Path, **options: Any) -> None:
                raise RuntimeError("killed")

            monkeypatch.setattr(encode_plan.shutil, "rmtree", killed)
            with pytest.raises(RuntimeError, match="killed"):
                encode_captions(tmp_path / "one", tmp_path / "store", Eye(), source="one")
            monkeypatch.undo()
            assert (tmp_path / "store" / "encoding" / "plan.json").exists() and len(
                training.EncodedDataset(tmp_path / "store")
            ) == 3
            encode_captions(tmp_path / name, tmp_path / "store", Eye(), source=name, **options)
            assert not (tmp_path / "store" / "encoding").exists()
            assert [one.name for one in training.EncodedDataset(tmp_path / "store").manifest.sources][-1] == name
            shutil.rmtree(tmp_path / "store")


class TestRefused:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        captions(tmp_path / "data", [1, 2, 3])
        encode_captions(tmp_path / "data", tmp_path / "store", Eye())
        return tmp_path

    def test_other_rows(self, made: Path) -> None:
        captions(made / "other", [4, 5])
        with pytest.raises(ConfigError, match="has the rows of captions: name another folder, or add other to it with"):
            encode_captions(made / "other", made / "store", Eye(), source="other")

    @pytest.mark.parametrize(
        ("options", "match"),
        [({"dtype": "int8"}, "dtype=float16, now int8"), ({"dim": 7}, "dim=5, now 7")],
    )
    def test_other_settings(self, made: Path, options: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            encode_captions(made / "data", made / "store", Eye(), **options)

    def test_another_encoder(self, made: Path) -> None:
        with pytest.raises(ConfigError, match=r"pictures by an encoder \(\w{12}…\), now by an encoder"):
            encode_captions(made / "data", made / "store", Eye(seed=1))

    def test_a_wider_memory(self, made: Path, reader: TextEncoder) -> None:
        rows = [Row("row", passages=("bluebell",))]
        with pytest.raises(ConfigError, match="are 12 wide, and the dataset has 5"):
            training.encode_rows(rows, made / "store", passages=reader, append=True)
        rows = [Row("row", memory=mmattn.Memory(torch.zeros(1, 2, width))) for width in (5, 9)]
        with pytest.raises(ConfigError, match="a memory is 9 wide, and the dataset has 5: give dim=9"):
            training.encode_rows(rows, made / "wide")

    def test_no_encoder(self, made: Path) -> None:
        rows = [Row("row", images=(str(made / "data" / "0.png"),))]
        with pytest.raises(ConfigError, match="rows of rows have pictures, and there is no encoder for them"):
            training.encode_rows(rows, made / "new", dim=5)
        with pytest.raises(ConfigError, match="have no memory, and there is no encoder: give dim="):
            training.encode_rows([Row("row")], made / "newer")
