"""Scores of texts, beside the libraries' own and beside figures worked out by hand."""

from __future__ import annotations

import sys

import pytest

from mmattn.errors import ConfigError, MissingExtraError, ShapeError
from mmattn.evaluation import text_scores


def test_bleu_and_chrf_of_unequal_numbers_of_references() -> None:
    from sacrebleu import corpus_bleu, corpus_chrf

    written = ["the cat sat on a mat today", "a red rose in the grass", "one two three four five"]
    references = [["a cat sat on the mat today", "the cat sat on the mat today"], ["a red rose in grass"], ["one two"]]
    streams = [["a cat sat on the mat today", "a red rose in grass", "one two"], [references[0][1], None, None]]
    found = text_scores(written, references)
    assert found == {
        "bleu": pytest.approx(corpus_bleu(written, streams).score),
        "chrf": pytest.approx(corpus_chrf(written, streams).score),
    }
    assert 0 < found["bleu"] < 100
    one = text_scores(written, ["the cat sat on a mat today", "a red rose in the grass", "one two three four five"])
    assert one == {"bleu": pytest.approx(100), "chrf": pytest.approx(100)}


@pytest.mark.parametrize(
    ("written", "reference", "errors"),
    [("1 2 3", "1 2 3", 0), ("", "1 2 3", 3), ("1 3", "1 2 3", 1), ("3 2 1", "1 2 3", 2), ("1 2 3 4", "1 2 3", 1)],
)
def test_words_that_are_wrong_missing_or_too_many(written: str, reference: str, errors: int) -> None:
    assert text_scores([written], [reference], ["wer"])["wer"] == pytest.approx(errors / 3)


def test_word_errors_are_those_of_all_texts_together() -> None:
    """A long text counts for more than a short one."""
    assert text_scores(["1", "1 2 3 4 5 6"], ["2", "1 2 3 4 5 6"], ["wer"])["wer"] == pytest.approx(1 / 7)


class TestRefusals:
    def test_what_cannot_be_scored(self) -> None:
        with pytest.raises(ShapeError, match="2 texts and 1 references"):
            text_scores(["a", "b"], ["a"])
        with pytest.raises(ShapeError, match="0 texts"):
            text_scores([], [])
        with pytest.raises(ConfigError, match="text 1 has no reference"):
            text_scores(["a", "b"], [["a"], []])
        with pytest.raises(ConfigError, match="metrics must be one of 'bleu', 'chrf', 'wer'; got 'spice'"):
            text_scores(["a"], ["a"], ["spice"])

    def test_a_library_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sacrebleu", None)
        with pytest.raises(MissingExtraError, match=r"mmattn\[metrics\]"):
            text_scores(["a"], ["a"])
