"""Chunks: nothing of a document is lost, sizes and overlaps hold, every chunk knows its place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from mmattn.errors import ConfigError, ShapeError, TextError
from mmattn.retrieval.corpus import chunk


def test_words_by_hand() -> None:
    found = chunk("a bb  ccc\ndd e f g", size=3, overlap=1)
    assert [(piece.text, piece.start, piece.end) for piece in found] == [
        ("a bb  ccc", 0, 9),
        ("ccc\ndd e", 6, 14),
        ("e f g", 13, 18),
    ]
    assert [piece.text for piece in chunk("a b c d e", size=2)] == ["a b", "c d", "e"]
    assert [piece.text for piece in chunk("a b", size=2, overlap=1)] == ["a b"]


@given(
    texts=st.lists(st.text(alphabet=st.sampled_from("ab .!?\n\té🌼好。<s>"), max_size=60), max_size=3),
    size=st.integers(1, 7),
    overlap=st.integers(0, 6),
)
def test_nothing_is_lost_and_everything_has_its_place(texts: list[str], size: int, overlap: int) -> None:
    overlap = min(overlap, size - 1)
    found = chunk(texts, size, overlap, unique=False)
    for number, document in enumerate(texts):
        own = [piece for piece in found if piece.source == number]
        covered: set[int] = set()
        for piece in own:
            assert piece.text == document[piece.start : piece.end] == piece.text.strip() != ""
            covered |= set(range(piece.start, piece.end))
        assert all(i in covered for i, letter in enumerate(document) if not letter.isspace())
        assert all(one.start < two.start and one.end < two.end for one, two in zip(own, own[1:], strict=False))
        if not overlap:
            assert all(one.end <= two.start for one, two in zip(own, own[1:], strict=False))


def test_sources_and_doubles() -> None:
    texts = ["X y. Z a.", "", "  \n", "Z a. X y."]
    found = chunk(texts, size=2, sources=["one", "two", "three", {"file": 4}])
    assert [(piece.text, piece.source, piece.start) for piece in found] == [("X y.", "one", 0), ("Z a.", "one", 5)]
    every = chunk(texts, size=2, unique=False)
    assert [(piece.text, piece.source) for piece in every] == [("X y.", 0), ("Z a.", 0), ("Z a.", 3), ("X y.", 3)]
    assert chunk([], size=3) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"size": 0}, ConfigError, "size must be at least 1"),
        ({"size": 2.0}, ConfigError, "size must be an int"),
        ({"size": 3, "overlap": -1}, ConfigError, "overlap must be at least 0"),
        ({"size": 3, "overlap": 3}, ConfigError, "overlap must be below size.*got 3 of 3"),
        ({"size": 3, "sources": ["a", "b"]}, ShapeError, "one entry per text, 1; got 2"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        chunk(["a text"], **options)


@pytest.mark.parametrize("texts", [None, [None], ["a\ud83c"], [b"a"]])
def test_what_is_no_text_is_named(texts: Any) -> None:
    with pytest.raises(TextError):
        chunk(texts, size=3)


@pytest.mark.parametrize(
    "text",
    {
        "Japanese": "".join(f"これは第{number}章の長い文章です。" for number in range(60)),
        "Chinese": "".join(f"第{number}章讲述了一个很长的故事，" for number in range(60)),
        "Thai": "".join(f"นี่คือข้อความยาวที่{number}" for number in range(60)),
        "in one line with English": "words and 漢字かな交じり文 " * 40,
        "accents of their own": "か\u3099き\u3099" * 200,
    }.values(),
)
def test_scripts_without_spaces_are_cut_too(text: str) -> None:
    """Invariant 135. No chunk of them has more than its size in characters, and together they are the text."""
    pieces = chunk(text, size=50, unique=False)
    assert len(pieces) > 3 and all(0 < len(piece.text) <= 50 * 12 for piece in pieces)
    bare = "".join(text.split())
    assert "".join("".join(piece.text.split()) for piece in pieces) == bare
    assert all(text[piece.start : piece.end] == piece.text for piece in pieces)
    assert not any(piece.text.startswith(("\u3099", "\u0e35", "\u0e48")) for piece in pieces)


def test_words_of_other_scripts_stay_whole() -> None:
    """Invariant 135."""
    for text in (
        "한국어 문장은 띄어쓰기를 한다",
        "x" * 5000,
        "naïve cafe\u0301 — ok",
        "👨\u200d👩\u200d👧 family",
        "שלום עולם",
    ):
        assert [piece.text for piece in chunk(text, size=1)] == text.split()
