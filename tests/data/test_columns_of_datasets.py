"""Rows as `datasets` hands them out: decoded or not, in every format, with memories of several lengths."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmattn
from mmattn.data.rows import make_row
from mmattn.encoders import load_audio
from mmattn.encoders.audio import sound_list
from mmattn.encoders.images import image_list
from mmattn.encoders.video import stream_frames
from mmattn.errors import AudioError, ConfigError, ShapeError
from mmattn.training import MemoryCollator

datasets = pytest.importorskip("datasets")
RATE, WIDTH = 16_000, 7
TONE = (np.sin(np.arange(1601) / 10) * 0.5).astype(np.float32)


def collator() -> MemoryCollator:
    """Ids as they are, and the memories."""
    return MemoryCollator(
        lambda rows: {"ids": [[int(one) for one in row["input_ids"]] for row in rows]}, "memory", WIDTH
    )


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_memories_of_any_lengths(form: str | None) -> None:
    """Invariant 156: a row at a time, and as a DataLoader fetches them."""
    tables: list[Any] = [torch.randn(m, WIDTH).tolist() for m in (3, 1, 5)] + [None, []]
    data = datasets.Dataset.from_list([{"input_ids": [5, 6], "memory": table} for table in tables])
    want = collator()(list(data))["memory"]
    data = data.with_format(form) if form else data
    assert isinstance(want, mmattn.Memory)
    for batch in (
        collator()([data[i] for i in range(5)]),
        next(iter(torch.utils.data.DataLoader(data, 5, collate_fn=collator()))),
    ):
        got: Any = batch["memory"]
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.real_slots(), want.real_slots())


def test_tables_in_pieces() -> None:
    """Invariant 156: lists of arrays or tensors, arrays of arrays, read-only ones; ragged widths are refused."""
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    fixed = table.copy()
    fixed.flags.writeable = False
    pieces = np.empty(2, dtype=object)
    pieces[:] = list(table)
    given = (table.tolist(), list(table), [torch.tensor(row) for row in table], pieces, fixed, table[::-1][::-1])
    for one in given:
        memory: Any = collator()([{"input_ids": [5], "memory": one}])["memory"]
        assert torch.equal(memory.tokens[0], torch.tensor(table))
    with pytest.raises(ShapeError, match="no table"):
        collator()([{"input_ids": [5], "memory": [table[0], table[1, :2]]}])


@pytest.mark.parametrize("form", ["arrow", "pandas"])
def test_formats_of_tables_are_refused(form: str) -> None:
    """Invariant 156."""
    row = datasets.Dataset.from_list([{"input_ids": [5, 6], "memory": [[0.5] * WIDTH]}]).with_format(form)[0]
    with pytest.raises(ConfigError, match=r"a row must be a dict of its columns.*with_format\(None\)"):
        collator()([row])
    with pytest.raises(ConfigError, match="a row must be a dict of its columns"):
        make_row(row)


def wave() -> bytes:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(file := io.BytesIO(), TONE, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


class AudioDecoder:
    """As torchcodec has it, which is not installed here."""

    def __getitem__(self, key: str) -> object:
        return {"array": TONE, "sampling_rate": RATE}[key]

    def get_all_samples(self) -> Any:
        return SimpleNamespace(data=torch.from_numpy(TONE)[None], sample_rate=RATE)


def sounds() -> dict[str, object]:
    """The same sound as every version and format of datasets hands it out."""
    return {
        "array": {"array": TONE, "sampling_rate": RATE, "path": None},
        "list": {"array": TONE.tolist(), "sampling_rate": RATE},
        "rate of numpy": {"array": TONE.astype(np.float64), "sampling_rate": np.int64(RATE)},
        "torch": {"array": torch.from_numpy(TONE), "sampling_rate": torch.tensor(RATE)},
        "bytes": {"bytes": wave(), "path": "a.wav"},
        "decoder": AudioDecoder(),
    }


@pytest.mark.parametrize("name", list(sounds()))
def test_sounds(name: str) -> None:
    """Invariant 156."""
    sound = sounds()[name]
    for one in (sound, *sound_list(sound), *sound_list([sound])):
        assert np.abs(load_audio(one).numpy() - TONE).max() < 1e-6


def test_a_sound_in_a_file(tmp_path: Path) -> None:
    """Invariant 156: bytes of None, and the path."""
    (tmp_path / "a.wav").write_bytes(wave())
    assert load_audio({"bytes": None, "path": str(tmp_path / "a.wav")}).shape == TONE.shape
    for wrong in ({"array": TONE}, {"array": TONE, "sampling_rate": 0.5}, {"bytes": None, "path": None}):
        with pytest.raises(AudioError):
            load_audio(wrong)


def pictures() -> dict[str, object]:
    """A picture in every form."""
    image = pytest.importorskip("PIL.Image").fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    image.save(file := io.BytesIO(), format="PNG")
    pixels = np.asarray(image)
    return {
        "PIL": image,
        "bytes": {"bytes": file.getvalue(), "path": None},
        "numpy": pixels,
        "torch": torch.from_numpy(pixels.copy()).permute(2, 0, 1),
    }


@pytest.mark.parametrize("name", list(pictures()))
def test_pictures(name: str) -> None:
    """Invariant 156: alone, in rows, and several in a column."""
    picture, want = pictures()[name], np.asarray(mmattn.load_image(pictures()["PIL"]))
    rows = [make_row({"text": "a", "image": picture}), make_row({"text": "a", "images": [picture, picture]})]
    for one in (picture, *image_list(picture), *rows[0].images, *rows[1].images):
        assert np.array_equal(np.asarray(mmattn.load_image(one)), want)


def test_pictures_and_texts_that_a_format_puts_together() -> None:
    """Invariant 156."""
    pixels = torch.zeros(2, 3, 4, 5, dtype=torch.uint8)
    row = make_row(
        {
            "text": np.str_("pets"),
            "images": pixels,
            "passages": np.array(["Cats purr.", "Dogs bark."]),
            "prompt": np.str_("of"),
        }
    )
    assert len(row.images) == 2 and row.prompt == "of" and row.passages == ("Cats purr.", "Dogs bark.")


class VideoDecoder:
    """As torchcodec has it, which is not installed here."""

    def __len__(self) -> int:
        return 3

    def get_frame_at(self, index: int) -> Any:
        data: Tensor = torch.full((3, 4, 5), 10 * index, dtype=torch.uint8)
        return SimpleNamespace(data=data, pts_seconds=0.5 + index / 2, duration_seconds=0.5)


def test_videos() -> None:
    """Invariant 156."""
    frames = list(stream_frames(VideoDecoder()))
    assert [frame.time for frame in frames] == [0, 0.5, 1]
    assert [int(np.asarray(mmattn.load_image(frame.image)).max()) for frame in frames] == [0, 10, 20]
