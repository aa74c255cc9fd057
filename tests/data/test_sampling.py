"""Order, collation and memories of rows: padded, bucketed, kept in files, the same for any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import mmattn
from mmattn import training
from mmattn.data.sampling import split_between_processes
from mmattn.errors import ConfigError, ImageError, ShapeError, TextError
from tests.training import small_run
from tests.training.small_run import Letters


class TestLengthOrder:
    LENGTHS = [(7 * number) % 101 for number in range(1013)]

    def test_every_row_once_and_like_lengths_together(self) -> None:
        order = training.LengthGroupedSampler(self.LENGTHS, batch_size=11, seed=2)
        batches = order.batches(0)
        assert sorted(i for batch in batches for i in batch) == list(range(1013))
        assert [len(batch) for batch in batches[:-1]] == [11] * 92 and len(batches[-1]) == 1
        spread = [max(self.LENGTHS[i] for i in batch) - min(self.LENGTHS[i] for i in batch) for batch in batches]
        assert sum(spread) / len(spread) < 10, "of 101 lengths"
        longest = [max(self.LENGTHS[i] for i in batch) for batch in batches]
        assert longest != sorted(longest) and longest != sorted(longest, reverse=True)

    def test_a_function_of_seed_and_epoch(self) -> None:
        order = training.LengthGroupedSampler(self.LENGTHS, batch_size=11, seed=2)
        assert order.batches(3) == training.LengthGroupedSampler(self.LENGTHS, batch_size=11, seed=2).batches(3)
        assert order.batches(3) != order.batches(4)
        assert order.batches(3) != training.LengthGroupedSampler(self.LENGTHS, batch_size=11, seed=1).batches(3)
        order.set_epoch(3)
        assert list(order) == [i for batch in order.batches(3) for i in batch] and len(order) == 1013

    @pytest.mark.parametrize("processes", [1, 2, 3])
    @pytest.mark.parametrize("pieces", [1, 4])
    def test_processes_share_a_batch(self, processes: int, pieces: int) -> None:
        batch = list(range(13))
        parts = [split_between_processes(batch, rank, processes, pieces) for rank in range(processes)]
        assert all(len(part) == pieces for part in parts)
        assert sorted(i for part in parts for piece in part for i in piece) == batch


class Eye:
    """An encoder that counts what it is shown: 3 slots for a picture, as wide as asked."""

    def __init__(self, dim: int = 5, name: str = "eye") -> None:
        self.dim, self.fingerprint, self.shown = dim, f"{name} {dim}" * 7, 0

    def __call__(self, images: list[Any], batch_size: int) -> mmattn.Memory:
        self.shown += len(images)
        value = [float(mmattn.load_image(image).getpixel((0, 0))[0]) for image in images]
        return mmattn.Memory(torch.tensor(value)[:, None, None].expand(-1, 3, self.dim).contiguous())


class Reader(Eye):
    """A slot for each word."""

    def __call__(self, texts: list[str], batch_size: int) -> mmattn.Memory:
        self.shown += len(texts)
        return mmattn.Memory.pad([torch.full((len(text.split()), self.dim), float(len(text))) for text in texts])


def painted(folder: Path, *values: int) -> list[str]:
    for value in values:
        Image.new("RGB", (3, 2), (value, 0, 0)).save(folder / f"{value}.png")
    return [str(folder / f"{value}.png") for value in values]


class TestRowMemories:
    def test_encoded_once(self, tmp_path: Path) -> None:
        one, two = painted(tmp_path, 10, 20)
        rows = [training.Row("a", images=(one,)), training.Row("b", images=(two, one)), training.Row("c")]
        eye = Eye()
        memories = training.RowMemories(tmp_path / "kept", pictures=eye)
        found = memories.of(rows)
        assert found is not None and found.lengths == [3, 6, 0] and eye.shown == 2
        assert found.tokens[1, :, 0].tolist() == [20.0] * 3 + [10.0] * 3
        assert found.segments is not None and found.segments[1].tolist() == [0, 0, 0, 1, 1, 1]
        again = training.RowMemories(tmp_path / "kept", pictures=eye).of(rows)
        assert eye.shown == 2 and torch.equal(again.tokens, found.tokens)
        other = Eye(name="other")
        training.RowMemories(tmp_path / "kept", pictures=other).of(rows)
        assert other.shown == 2, "another encoder has another folder"
        Image.new("RGB", (3, 2), (30, 0, 0)).save(one)
        assert training.RowMemories(tmp_path / "kept", pictures=eye).of(rows[:1]).tokens[0, 0, 0] == 30.0

    def test_pictures_passages_and_saved_memories_in_one_row(self, tmp_path: Path) -> None:
        (one,) = painted(tmp_path, 10)
        mmattn.Memory(torch.full((1, 2, 4), 7.0)).save(tmp_path / "seen.safetensors")
        row = training.Row("a", images=(one,), passages=("two words", one), memory=str(tmp_path / "seen.safetensors"))
        memories = training.RowMemories(tmp_path / "kept", pictures=Eye(5), passages=Reader(11))
        (found,) = memories.of([row]).tokens
        assert memories.dim == 11 and found[:3, 0].tolist() == [10.0] * 3
        assert found[3:5, 0].tolist() == [9.0] * 2 and found[5, 0] == len(one), "a passage is never a path"
        assert found[-2:, 0].tolist() == [7.0] * 2 and not found[-2:, 4:].any() and not found[:3, 5:].any()

    def test_processes_share_the_work(self, tmp_path: Path) -> None:
        rows = [training.Row("a", images=(path,)) for path in painted(tmp_path, *range(7))]
        eyes = [Eye(), Eye()]
        for rank, eye in enumerate(eyes):
            memories = training.RowMemories(tmp_path / "kept", pictures=eye)
            memories.prepare(rows, process_index=rank, num_processes=2)
        assert sorted(eye.shown for eye in eyes) == [3, 4]
        assert training.RowMemories(tmp_path / "kept", pictures=Eye()).prepare(rows) == 0

    def test_pictures_that_cannot_be_read(self, tmp_path: Path) -> None:
        """They are passed over where that is asked for, in every process alike, and the others are encoded."""
        paths = painted(tmp_path, *range(7))
        Path(paths[2]).write_bytes(b"no picture")
        Path(paths[5]).write_bytes(Path(paths[5]).read_bytes()[:40])
        rows = [training.Row(path, images=(path,)) for path in paths]
        with pytest.raises(ImageError, match="[25].png"):
            training.RowMemories(tmp_path / "strict", pictures=Eye()).prepare(rows)
        processes = [training.RowMemories(tmp_path / "kept", pictures=Eye(), batch_size=3) for _ in range(2)]
        for rank, memories in enumerate(processes):
            memories.prepare(rows, process_index=rank, num_processes=2, skip_broken=True)
        assert sum(memories.skipped for memories in processes) == 2
        for memories in processes:
            found = memories.unreadable(rows)
            assert set(found) == {2, 5} and "2.png" in found[2] and "5.png" in found[5]
            kept = [row for number, row in enumerate(rows) if number not in found]
            assert memories.prepare(kept) == 0, "all others are encoded already"
            memory = memories.of(kept)
            assert memory is not None and memory.lengths == [3] * 5
        with pytest.raises(ImageError, match="[25].png"):
            processes[0].of(rows)

    def test_what_cannot_be(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="width of the memory must be given"):
            training.RowMemories(tmp_path)
        memories = training.RowMemories(tmp_path, dim=5)
        with pytest.raises(ConfigError, match="no encoder for them"):
            memories.of([training.Row("a", passages=("x",))])
        with pytest.raises(ShapeError, match="must have one row"):
            memories.of([training.Row("a", memory=mmattn.Memory(torch.ones(2, 3, 5)))])
        with pytest.raises(ShapeError, match="give dim=7"):
            memories.of([training.Row("a", memory=mmattn.Memory(torch.ones(1, 3, 7)))])


class TestCollator:
    def test_prompts_are_read_and_not_learned(self, tmp_path: Path) -> None:
        memories = training.RowMemories(tmp_path, dim=5)
        rows = [
            training.Row("cd", prompt="ab", memory=mmattn.Memory(torch.ones(1, 3, 5))),
            training.Row("e", memory=None),
        ]
        batch = training.RowCollator(Letters(), memories)(rows)
        assert batch["input_ids"].tolist() == [[1, 3, 4, 5, 6, 2], [1, 7, 2, 0, 0, 0]]
        assert batch["labels"].tolist() == [[-100, -100, -100, 5, 6, 2], [1, 7, 2, -100, -100, -100]]
        assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
        assert batch["memory"].lengths == [3, 0]
        assert "memory" not in training.RowCollator(Letters(), memories)(rows[1:])
        assert "memory" not in training.RowCollator(Letters(), text_only=True)(rows)
        assert "memory" not in training.RowCollator(Letters())(rows[1:])

    def test_memories_are_not_dropped(self, tmp_path: Path) -> None:
        row = training.Row("a", memory=mmattn.Memory(torch.ones(1, 3, 5)))
        with pytest.raises(ConfigError, match="would drop it: give it a RowMemories, or text_only=True"):
            training.RowCollator(Letters())([training.Row("b"), row])
        with pytest.raises(ConfigError, match="give one of them"):
            training.RowCollator(Letters(), training.RowMemories(tmp_path, dim=5), text_only=True)

    def test_rows_of_a_dataset(self, tmp_path: Path) -> None:
        """Their memories are tables of numbers; None and an empty table are none."""
        collator = training.RowCollator(Letters(), training.RowMemories(tmp_path, dim=5))
        rows = [
            {"text": "cd", "prompt": "ab", "memory": [[1.0] * 5] * 3},
            {"text": "e", "memory": torch.ones(2, 5)},
            {"text": "e", "memory": None},
            {"text": "f", "memory": []},
        ]
        batch = collator(rows)
        assert batch["input_ids"].tolist()[1] == [1, 7, 2, 0, 0, 0] and batch["memory"].lengths == [3, 2, 0, 0]
        assert batch["memory"].tokens[:2].sum() == 5 * 5
        with pytest.raises(ConfigError, match=r"must be vectors \(m, e\)"):
            collator([{"text": "a", "memory": [[1.0], [1.0, 2.0]]}])
        with pytest.raises(ConfigError, match="unknown key 'txt'"):
            collator([{"txt": "a"}])

    def test_too_long(self) -> None:
        rows = [training.Row("ab"), training.Row("abcdef", prompt="a")]
        with pytest.raises(TextError, match="row 1 has 9 tokens .* at most 7 fit"):
            training.RowCollator(Letters(), max_length=7).check(rows)
        made = training.RowCollator(Letters(), max_length=7, truncation=True)(rows)["input_ids"]
        assert made[1].tolist() == [1, 3, 3, 4, 5, 6, 2]
        with pytest.raises(TextError, match="row 0 has 11 tokens"):
            training.RowCollator(Letters(), max_length=7, truncation=True).check([training.Row("a", prompt="abcdefgh")])


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.slow
def test_workers_of_a_data_loader(tmp_path: Path, start: str) -> None:
    """Invariant 78: the same batches, memories included, as without workers."""
    rows = small_run.rows(7)
    sampler = training.LengthGroupedSampler([row.text_length for row in rows], batch_size=3, seed=1)
    given = {"batch_size": 3, "sampler": sampler, "collate_fn": small_run.collator(tmp_path)}
    alone = list(DataLoader(rows, **given))
    beside = list(DataLoader(rows, **given, num_workers=1, multiprocessing_context=start))
    assert len(beside) == len(alone) == 3
    for want, got in zip(alone, beside, strict=True):
        assert set(got) == set(want)
        memories = [batch.pop("memory", None) for batch in (want, got)]
        assert all(torch.equal(got[name], value) for name, value in want.items())
        if memories[0] is not None:
            assert all(torch.equal(a, b) for a, b in zip(*(m.tensors() for m in memories), strict=True))
