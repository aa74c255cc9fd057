"""Traces: sizes that fit, files that are whole or refused, and how they are drawn in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmattn
from mmattn import inspect
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError, ShapeError, TextError
from mmattn.inspect.trace import FILE, SIDE
from mmattn.storage.safetensors import read_tensors, write_tensors

GOLDEN = Path(__file__).parent / "golden" / "1"
WORDS, SOURCES, LAYERS, HEADS = ("one", "two", "three"), ("a", "b", "c", "d", "e", "f"), ("layer 1", "layer 3"), 5


def made(**changes: Any) -> mmattn.inspect.Trace:
    """A trace of 2 layers, 5 heads, 3 words and 6 sources with everything that can be known."""
    torch.manual_seed(0)
    shares = torch.rand(len(LAYERS), HEADS, len(WORDS), len(SOURCES))
    settings: dict[str, Any] = {
        "words": WORDS,
        "sources": SOURCES,
        "weights": shares / shares.sum(-1, keepdim=True),
        "layers": LAYERS,
        "title": "a title",
        "probability": torch.tensor([0.75, 0.5, 0.25]),
        "without": torch.tensor([0.125, 0.5, 0.5]),
        "dropped": torch.rand(len(WORDS), len(SOURCES)),
        "grid": (2, 3),
        "picture": Image.new("RGB", (307, 211), (200, 30, 10)),
    }
    return mmattn.inspect.Trace(**(settings | changes))


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    bare = made(probability=None, without=None, dropped=None, grid=None, picture=None, queries="sources")
    patches = made(word_grid=(3, 1), word_picture=Image.new("RGB", (101, 307), (0, 90, 10)))
    given = [made(), bare, patches]
    file = inspect.save_traces(given, tmp_path)
    assert file == tmp_path / FILE
    for got, want in zip(inspect.load_traces(tmp_path), given, strict=True):
        for name in ("words", "sources", "layers", "title", "queries", "grid", "picture", "word_grid", "word_picture"):
            assert getattr(got, name) == getattr(want, name)
        for name in ("weights", "probability", "without", "dropped"):
            loaded, own = getattr(got, name), getattr(want, name)
            assert (loaded is None and own is None) or torch.equal(loaded, own)


def test_a_picture_is_kept_small() -> None:
    picture = made().picture
    assert picture[:3] == b"\xff\xd8\xff" and len(picture) < 20_000
    assert made(picture=picture).picture == picture
    import io

    assert max(Image.open(io.BytesIO(picture)).size) == SIDE


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"words": ["one"]}, ShapeError, r"weights of 2 layers, 1 words and 6 sources must be \(2, 5, 1, 6\)"),
        ({"weights": torch.ones(3, 6)}, ShapeError, "weights"),
        ({"dropped": torch.ones(6, 3)}, ShapeError, r"dropped .* must be \(3, 6\), got \(6, 3\)"),
        ({"grid": (2, 2)}, ShapeError, "grid of 2 × 2 patches does not fit 6 sources"),
        ({"word_grid": (2, 3)}, ShapeError, "grid of 2 × 3 patches does not fit 3 words"),
        ({"dropped": torch.full((3, 6), torch.nan)}, NonFiniteError, "dropped"),
        ({"words": ["one", "two", None]}, TextError, "text 2"),
        ({"queries": "heads"}, ConfigError, "queries"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made(**changes)


def test_a_golden_file_loads() -> None:
    """Traces that mmattn 1.0 saved."""
    tensors, _ = read_tensors(GOLDEN / FILE, "mmattn-traces")
    text, patches = inspect.load_traces(GOLDEN)
    assert (text.words, text.title, text.queries) == (("a", "b", "c", "d", "e"), "a title", "words")
    assert text.grid is None
    assert (patches.sources, patches.queries) == (("a", "b", "c", "d"), "sources")
    assert patches.grid == (2, 2) and patches.word_grid == (3, 2)
    for name, tensor in tensors.items():
        number, field = name.split(".")
        got = getattr((text, patches)[int(number)], field)
        assert got == tensor.numpy().tobytes() if isinstance(got, bytes) else torch.equal(got, tensor)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match=r"no attention\.safetensors in .*train again"):
        inspect.load_traces(tmp_path)
    write_tensors(tmp_path / FILE, {}, {"format": "mmattn-traces", "format_version": 2, "traces": []})
    with pytest.raises(AdapterFileError, match="format version 2, and this mmattn reads 1; update"):
        inspect.load_traces(tmp_path)
    write_tensors(tmp_path / FILE, {}, {"format": "mmattn-memory", "format_version": 1})
    with pytest.raises(AdapterFileError, match="'mmattn-memory'"):
        inspect.load_traces(tmp_path)
    broken = {"title": "", "words": ["one"], "sources": ["a"], "layers": ["x"], "queries": "words", "grid": None}
    broken |= {"word_grid": None}
    for traces in ([broken], [{}], [3], 7, [broken | {"grid": [1]}]):
        tensors = {"0.weights": torch.ones(1, 1, 2, 1)}
        write_tensors(tmp_path / FILE, tensors, {"format": "mmattn-traces", "traces": traces})
        with pytest.raises(AdapterFileError, match="holds no sound traces"):
            inspect.load_traces(tmp_path)
    with pytest.raises(ConfigError, match="no traces"):
        inspect.save_traces([], tmp_path)


def test_a_terminal_shows_bars_and_counterfactuals() -> None:
    weights = torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.0, 0.0]])[None, None]
    trace = mmattn.inspect.Trace(
        ["one\x1b[2J", "\n"],
        ["a passage", "another\nline", "c"],
        weights,
        ["layer 1"],
        "a title",
        probability=torch.tensor([0.5, 0.125]),
        without=torch.tensor([0.25, 0.125]),
        dropped=torch.tensor([[0.125, 0.5, 0.5], [0.125, 0.125, 0.125]]),
    )
    lines = trace.draw(top=2, width=8).splitlines()
    assert lines == [
        "a title",
        "one [2J  50.0 %, 25.0 % without memory",
        "  ██████     75.0 %  a passage  -37.5 points if dropped",
        "  ██         25.0 %  another line  +0.0 points if dropped",
        r"'\n'  12.5 %, 12.5 % without memory",
        "              0.0 %  a passage  +0.0 points if dropped",
        "              0.0 %  another line  +0.0 points if dropped",
    ]
