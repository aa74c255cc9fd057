"""Encoding a dataset: the same vectors, broken rows named, finished shards and files that changed found again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, Value, load_from_disk

import mmattn
from mmattn import training
from mmattn.encoders import TextEncoder
from mmattn.errors import ConfigError, ImageError, ShapeError
from tests.data.encoded_rows import Eye, captions, encode_captions, encoded, picture, start
from tests.tiny_texts import WIDTH


@pytest.fixture(scope="module")
def reader(bert: Path) -> TextEncoder:
    return TextEncoder(bert, pooling="none")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for half precision, and for the rounding of another batch."""
    assert torch.isfinite(got).all() and got.shape == want.shape
    assert torch.allclose(got, want, rtol=2e-3, atol=1e-4)


class TestWhatComesBack:
    @pytest.mark.parametrize("rows_per_shard", [1, 3, 50])
    def test_every_kind_of_memory(self, rows_per_shard: int, reader: TextEncoder, tmp_path: Path) -> None:
        """Invariant 110, in half precision: a picture, several, passages, a saved memory, all together, nothing."""
        first, second = (str(picture(tmp_path / f"{n}.png", n)) for n in (1, 2))
        saved = mmattn.Memory(
            torch.randn(1, 4, 7),
            mask=torch.tensor([[True, False, True, True]]),
            segments=torch.tensor([[0, 0, 2, 1]]),
            scores=torch.tensor([[0.5, 9.0, -1.5, 2.0]]),
        )
        saved.save(tmp_path / "saved.safetensors")
        file, words = str(tmp_path / "saved.safetensors"), ["the bluebell", "flowers in spring"]
        rows = [
            {"text": "a picture", "images": [first]},
            {"text": "nothing"},
            {"text": "two pictures", "prompt": "Say:", "images": [second, first]},
            {"text": "words", "passages": words},
            {"text": "saved", "memory": file},
            {"text": "all", "images": [first], "passages": words[:1], "memory": file},
        ]
        names = ("text", "prompt", "images", "passages", "memory")
        data = Dataset.from_list([{name: row.get(name) for name in names} for row in rows])
        eye = Eye()
        got = training.encode_dataset(
            data, tmp_path / "shards", pictures=eye, passages=reader, rows_per_shard=rows_per_shard
        ).with_format("torch")
        seen = eye([first, second]).tokens
        read = [reader([text]) for text in words]
        parts: list[list[mmattn.Memory]] = [
            [mmattn.Memory(seen[:1])],
            [],
            [mmattn.Memory(seen[1:]), mmattn.Memory(seen[:1])],
            read,
            [saved],
            [mmattn.Memory(seen[:1]), read[0], saved],
        ]
        assert got["text"][:] == [row["text"] for row in rows] and len(got) == len(rows)
        assert got[2]["prompt"] == "Say:" and got[5]["sources"] == [first, words[0]]
        for row, memories in zip(got, parts, strict=True):
            memory = training.stack_memories([row])
            if not memories:
                assert memory is None
                continue
            widened = [part.replace(torch.nn.functional.pad(part.tokens, (0, WIDTH - part.dim))) for part in memories]
            want = mmattn.Memory.cat(widened)
            real = want.real_slots()[0]
            assert memory is not None
            close(memory.tokens[0], want.tokens[0, real])
            assert memory.segments is not None
            if len(memories) == 1:
                segments = torch.zeros_like(real, dtype=torch.long) if want.segments is None else want.segments[0]
                assert torch.equal(memory.segments[0], segments[real])
            else:  # a segment for each content, but those that a saved memory has
                counts = [part.length for part in memories if part.segments is None]
                numbers = [number for number, count in enumerate(counts) for _ in range(count)]
                saved_segments = [len(counts) + segment for segment in (0, 2, 1)] if memories[-1] is saved else []
                assert memory.segments[0].tolist() == numbers + saved_segments
            assert (memory.scores is None) == (want.scores is None)
            assert want.scores is None or torch.equal(memory.scores[0], want.scores[0, real])

    def test_its_encoders_are_known_wherever_it_is_loaded(self, tmp_path: Path) -> None:
        eye, names = Eye(pooled=True), {"pictures": "tiny:eye"}
        encode_captions(captions(tmp_path / "data", [1, 2, 3]), tmp_path / "shards", eye, names=names).save_to_disk(
            tmp_path / "saved"
        )
        encoding = training.encoding_of(load_from_disk(tmp_path / "saved").select([1]))
        assert encoding is not None and (encoding.dim, encoding.saved_memories) == (eye.dim, False)
        info = encoding.encoders["pictures"]
        assert (info.name, info.pooled, info.grid) == ("tiny:eye", True, [1, 1])
        assert encoding.fingerprint == info.fingerprint == eye.fingerprint
        assert training.encoding_of(Dataset.from_dict({"text": ["a"]})) is None

    def test_a_picture_is_encoded_once_in_a_batch(self, tmp_path: Path) -> None:
        path = str(picture(tmp_path / "0.png", 7))
        rows = Dataset.from_dict({"text": ["a", "b", "c"], "image": [path] * 3})
        training.encode_dataset(rows, tmp_path / "shards", pictures=Eye(tmp_path / "log"))
        assert encoded(tmp_path / "log") == 1

    def test_what_a_unet_draws_stays(self, tmp_path: Path) -> None:
        drawn, like = (str(picture(tmp_path / f"{n}.png", n)) for n in (3, 4))
        rows = Dataset.from_dict({"image": [drawn, drawn], "text": ["a", ""], "example": [None, like]})
        got = training.encode_dataset(rows, tmp_path / "shards", pictures=Eye(), host="unet").with_format("torch")
        assert got["image"][:] == [drawn, drawn] and got["sources"][:] == [[drawn], [like]]
        close(got[1]["memory"], Eye()([like]).tokens[0])

    def test_a_stream(self, tmp_path: Path) -> None:
        rows = training.read_rows(captions(tmp_path / "data", list(range(11))), split="train", streaming=True)
        stream = training.encode_dataset(rows, tmp_path / "shards", pictures=Eye(), batch_size=2)
        want = Eye()([str(tmp_path / "data" / f"{n}.png") for n in range(11)]).tokens
        for row, tokens in zip(stream.with_format("torch"), want, strict=True):
            close(row["memory"], tokens)
        encoding = training.encoding_of(stream)
        assert encoding is not None and encoding.encoders["pictures"].fingerprint == Eye().fingerprint


class TestBroken:
    def broken(self, folder: Path) -> Path:
        """Nine rows, of which the third and seventh cannot be read."""
        captions(folder, [1, 2, 0, 3, 4, 5, 0, 6, 7])
        for number in (2, 6):
            (folder / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing else")
        return folder

    def test_they_are_named(self, tmp_path: Path) -> None:
        made = encode_captions(self.broken(tmp_path / "data"), tmp_path / "shards", Eye())
        kept, reasons = training.drop_errors(made)
        assert [row["text"].split()[1] for row in kept] == list("0134578") and "error" not in kept.column_names
        for number, reason in zip((2, 6), reasons, strict=True):
            assert reason.startswith(f"row {number}: ") and f"{number}.png" in reason
        whole = Eye()([str(tmp_path / "data" / f"{n}.png") for n in (0, 1, 3, 4, 5, 7, 8)]).tokens
        for row, tokens in zip(kept, whole, strict=True):
            close(row["memory"], tokens)

    def test_strict_refuses_them(self, tmp_path: Path) -> None:
        with pytest.raises(ImageError, match=r"row 2: .*2\.png"):
            encode_captions(self.broken(tmp_path / "data"), tmp_path / "shards", Eye(), strict=True)

    def test_pictures_in_the_dataset(self, tmp_path: Path) -> None:
        """Decoding one would be an error of Pillow, without the number of its row."""
        contents = [picture(tmp_path / "0.png", 3).read_bytes(), b"no picture"]
        features = Features({"text": Value("string"), "image": Image()})
        rows = Dataset.from_dict(
            {"text": ["a", "b"], "image": [{"bytes": raw, "path": None} for raw in contents]}, features=features
        )
        with pytest.raises(ImageError, match="row 1: "):
            training.encode_dataset(rows, tmp_path / "shards", pictures=Eye())

    @pytest.mark.parametrize(
        ("row", "values"),
        [
            ({"text": ""}, "'text' is empty"),
            ({"text": None}, "'text' is missing"),
            ({"image": "gone.png"}, "'image'.*gone.png"),
            ({"passages": [""]}, "'passages' has an empty text"),
        ],
    )
    def test_rows(self, row: dict[str, Any], values: str, reader: TextEncoder, tmp_path: Path) -> None:
        path = str(picture(tmp_path / "0.png", 3))
        whole = {"text": "a", "image": path, "passages": ["b"]}
        rows = Dataset.from_list([whole, {**whole, **row}])
        given: dict[str, Any] = {"pictures": Eye(), "passages": reader}
        with pytest.raises(ConfigError, match=f"row 1: {values}"):
            training.encode_dataset(rows, tmp_path / "shards", **given)
        kept, (reason,) = training.drop_errors(
            training.encode_dataset(rows, tmp_path / "shards", strict=False, **given)
        )
        assert reason.startswith("row 1: ") and len(kept) == 1
        with pytest.raises(ConfigError, match="no row can be used:\n  row 0: "):
            training.drop_errors(training.encode_dataset(rows.select([1]), tmp_path / "shards", strict=False, **given))


class TestGoingOn:
    COLOURS = list(range(13))

    @pytest.mark.slow
    @pytest.mark.parametrize("kill", [1, 4, 7])
    def test_killed_it_goes_on_at_the_shard(self, kill: int, tmp_path: Path) -> None:
        """Invariant 109: no row twice, and none encoded again but those of the shard in work."""
        captions(tmp_path / "data", self.COLOURS)
        done = start(tmp_path / "data", tmp_path / "shards", tmp_path / "log", kill=kill)
        assert done.returncode == -signal.SIGKILL, done.stderr
        before = encoded(tmp_path / "log") if kill > 1 else 0
        done = start(tmp_path / "data", tmp_path / "shards", tmp_path / "log")
        assert done.returncode == 0, done.stderr
        assert encoded(tmp_path / "log") - before == 13 - before // 4 * 4
        got = encode_captions(tmp_path / "data", tmp_path / "shards", Eye(tmp_path / "again"))
        assert not (tmp_path / "again").exists(), "all shards were found"
        want = encode_captions(tmp_path / "data", tmp_path / "whole", Eye())
        assert got["text"][:] == want["text"][:] and len(got) == 13
        assert all(torch.equal(a["memory"], b["memory"]) for a, b in zip(got, want, strict=True))

    @pytest.mark.parametrize("change", ["encoder", "picture", "rows", "dtype"])
    def test_what_has_changed_is_encoded_anew(self, change: str, tmp_path: Path) -> None:
        """Invariant 109: a changed encoder, file or setting never meets old vectors."""
        data = captions(tmp_path / "data", [1, 2, 3])
        old = encode_captions(data, tmp_path / "shards", Eye())
        eye, options = Eye(tmp_path / "log", seed=int(change == "encoder")), {}
        if change == "picture":
            picture(data / "1.png", 200)
        if change == "rows":
            captions(data, [3, 2, 1])
        if change == "dtype":
            options = {"dtype": "float32"}
        new = encode_captions(data, tmp_path / "shards", eye, **options)
        assert encoded(tmp_path / "log") == 3
        want = eye([str(data / f"{n}.png") for n in range(3)]).tokens
        for row, tokens in zip(new, want, strict=True):
            close(row["memory"], tokens)
        assert not torch.equal(old[1]["memory"], new[1]["memory"]) or change == "rows"

    @pytest.mark.slow
    def test_in_two_processes(self, tmp_path: Path) -> None:
        data = captions(tmp_path / "data", self.COLOURS)
        want = encode_captions(data, tmp_path / "whole", Eye())
        got = encode_captions(data, tmp_path / "shards", Eye(), num_proc=2)
        assert all(torch.equal(a["memory"], b["memory"]) for a, b in zip(got, want, strict=True))


def test_what_cannot_be(reader: TextEncoder, tmp_path: Path) -> None:
    path = str(picture(tmp_path / "0.png", 3))
    pictures = Dataset.from_dict({"text": ["a"], "image": [path]})
    mmattn.Memory(torch.ones(1, 2, 9)).save(tmp_path / "wide.safetensors")
    mmattn.Memory(torch.full((1, 2, 5), 1e5)).save(tmp_path / "high.safetensors")
    mmattn.Memory(torch.ones(2, 3, 5)).save(tmp_path / "two.safetensors")

    def saved(name: str) -> Dataset:
        return Dataset.from_dict({"text": ["a"], "memory": [str(tmp_path / name)]})

    both: dict[str, Any] = {"pictures": Eye()}
    cases: list[tuple[Dataset, dict[str, Any], type[Exception], str]] = [
        (pictures, {}, ConfigError, "pictures"),
        (pictures, {**both, "dim": 3}, ConfigError, "dim=5"),
        (pictures, {**both, "dtype": "int8"}, ConfigError, "'float16', 'float32'"),
        (pictures, {**both, "batch_size": 0}, ConfigError, "batch_size"),
        (pictures, {**both, "rows_per_shard": 0}, ConfigError, "rows_per_shard"),
        (pictures, {**both, "host": "gan"}, ConfigError, "host"),
        (Dataset.from_dict({"text": ["a"]}), {}, ConfigError, "dim="),
        (pictures.select([]), both, ConfigError, "no rows"),
        (saved("wide.safetensors"), {"dim": 5}, ConfigError, "row 0: .*dim=9"),
        (saved("high.safetensors"), {}, ConfigError, r"row 0: .*1e\+05.*float16"),
        (saved("two.safetensors"), {}, ShapeError, "2"),
    ]
    for number, (rows, options, error, values) in enumerate(cases):
        with pytest.raises(error, match=values):
            training.encode_dataset(rows, tmp_path / str(number), **options)


class TestShuffled:
    @staticmethod
    def moved(texts: list[str], memories: list[int | None]) -> list[int | None]:
        """The memories of rows, named by a number, after they were shuffled."""
        tables = [None if number is None else [[float(number)] * 3] for number in memories]
        rows = Dataset.from_dict({"text": texts, "memory": tables})
        shuffled = training.shuffle_memories(rows)
        assert not len(shuffled) or shuffled["text"][:] == texts
        return [None if memory is None else int(memory[0][0]) for memory in shuffled["memory"]]

    def test_each_row_gets_that_of_the_next(self) -> None:
        assert self.moved(["a", "b", "c"], [1, 2, 3]) == [2, 3, 1]
        assert self.moved(["a", "b", "c"], [1, None, 3]) == [3, None, 1], "rows without a memory stay"
        assert self.moved(["a", "b"], [1, None]) == [], "one memory has none to be exchanged with"

    def test_not_with_one_of_the_same_class(self) -> None:
        """In class folders the next row has the same text: its memory would do as well."""
        got = self.moved(["a rose"] * 5 + ["an iris"] * 5, list(range(10)))
        assert all(number >= 5 for number in got[:5]) and all(number < 5 for number in got[5:])

    def test_not_with_the_same_picture(self, tmp_path: Path) -> None:
        """A picture with five captions stands in five rows, one after the other."""
        got = self.moved([f"text {n}" for n in range(15)], [n // 5 for n in range(15)])
        assert all(got[n] != n // 5 for n in range(15))
        rows = encode_captions(captions(tmp_path / "data", [3, 3, 3, 7, 7, 7]), tmp_path / "shards", Eye())
        for own, other in zip(rows, training.shuffle_memories(rows), strict=True):
            assert other["text"] == own["text"] and not torch.equal(other["memory"], own["memory"])
