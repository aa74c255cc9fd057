"""Chunks: nothing of a document is lost, sizes and overlaps hold, every chunk knows its place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmattn.errors import ConfigError, ShapeError, TextError
from mmattn.retrieval.corpus import chunk
from tests.tiny_texts import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
DOCUMENT = (
    "Dr. Ash met J. Doe at 3.14 p.m. today.  He said: “No!” Then (he left.) Was it e.g. fine... ok? 好。是！\n \nAn end"
)


def spans(text: str, tokenizer: Any) -> list[tuple[int, int]]:
    return tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, split_special_tokens=True)[
        "offset_mapping"
    ]


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
    by=st.sampled_from(["words", "tokens"]),
)
def test_nothing_is_lost_and_everything_has_its_place(texts: list[str], size: int, overlap: int, by: str) -> None:
    overlap = min(overlap, size - 1)
    tokenizer = TOKENIZER if by == "tokens" else None
    found = chunk(texts, size, overlap, tokenizer=tokenizer, unique=False)
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


@pytest.mark.parametrize(("size", "overlap"), [(5, 0), (7, 3), (11, 10)])
def test_sizes_are_counted_by_the_tokenizer(size: int, overlap: int) -> None:
    document = "in spring the bluebell flowers in the woods" + " in the spring woods" * 3
    places = spans(document, TOKENIZER)
    found = chunk(document, size, overlap, tokenizer=TOKENIZER, unique=False)
    assert len(found) > 3
    inside = [[place for place in places if place[0] < piece.end and piece.start < place[1]] for piece in found]
    assert {len(tokens) for tokens in inside[:-1]} == {size}
    assert 0 < len(inside[-1]) <= size
    assert {len(set(one) & set(two)) for one, two in zip(inside, inside[1:], strict=False)} == {overlap}


def test_a_character_of_several_tokens_stays_whole() -> None:
    flower = "🌼"
    assert len(spans(flower, TOKENIZER)) == 4
    found = chunk(flower * 3, size=5, tokenizer=TOKENIZER, unique=False)
    assert [piece.text for piece in found] == [flower] * 3
    assert [piece.text for piece in chunk(flower * 3, size=8, tokenizer=TOKENIZER)] == [flower * 2, flower]
    assert [piece.text for piece in chunk(flower * 4, size=12, tokenizer=TOKENIZER)] == [flower * 3, flower]
    assert [piece.text for piece in chunk(flower, size=3, tokenizer=TOKENIZER)] == [flower]


def test_special_tokens_in_a_document_count_as_letters() -> None:
    assert [piece.text for piece in chunk("<s>a", size=1, tokenizer=TOKENIZER)] == ["<", "s", ">", "a"]


def test_blanks_that_a_tokenizer_counts_to_its_tokens_are_left_out() -> None:
    raw = Tokenizer(models.WordLevel({"▁the": 0, "▁woods": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?")
    assert spans("the woods", tokenizer) == [(0, 3), (3, 9)]
    found = chunk("the woods", size=1, tokenizer=tokenizer)
    assert [(piece.text, piece.start, piece.end) for piece in found] == [("the", 0, 3), ("woods", 4, 9)]


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
        ({"size": 3, "tokenizer": str.split}, ConfigError, "must be a fast one"),
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
