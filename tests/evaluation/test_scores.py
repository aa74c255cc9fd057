"""Scores of texts, rankings and images, beside the libraries' own and beside formulas."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import mmattn
from mmattn.errors import ConfigError, MissingExtraError, NonFiniteError, ShapeError
from mmattn.evaluation import frechet_distance, retrieval_scores, text_scores


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


def test_the_formulas() -> None:
    """Recall, reciprocal rank and graded nDCG (arXiv 1304.6480, with gains as they are) of two queries."""
    found = [["a", "b", "c", "d"], ["x", "y", None]]
    relevant = [{"c": 3, "a": 1, "z": 2}, ["y"]]
    scores = retrieval_scores(found, relevant, ["R@2", "RR@10", "nDCG@10", "Success@1"])
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    assert scores == {
        "R@2": pytest.approx((1 / 3 + 1) / 2),
        "RR@10": pytest.approx(3 / 4),
        "nDCG@10": pytest.approx(((1 + 3 / 2) / ideal + 1 / math.log2(3)) / 2),
        "Success@1": 1 / 2,
    }


def test_a_metric_with_two_names_has_one_score() -> None:
    scores = retrieval_scores([["b", "a"]], [["a"]], ["RR@10", "MRR@10"])
    assert scores == {"RR@10": 1 / 2, "MRR@10": 1 / 2}


def test_a_query_that_found_nothing_counts() -> None:
    assert retrieval_scores([[], ["a"], [None]], [["a"], ["a"], ["b"]], ["R@5"]) == {"R@5": pytest.approx(1 / 3)}


def test_the_order_decides_and_not_the_names() -> None:
    """The best stands first whatever it is called, and ids may be numbers."""
    for line in ([3, 20, 1], [20, 3, 1], [1, 3, 20]):
        assert retrieval_scores([line], [[3]], ["RR"])["RR"] == pytest.approx(1 / (line.index(3) + 1))


def test_hits_of_an_index() -> None:
    vectors = torch.eye(11)
    hits = mmattn.Index.build(vectors).search(vectors[:7] + 0.1 * vectors[3], 5)
    assert retrieval_scores(hits, [[row] for row in range(7)]) == {"R@10": 1, "nDCG@10": 1, "RR@10": 1}
    assert retrieval_scores(hits, [[row + 1] for row in range(7)], ["Success@1"])["Success@1"] == 0


def test_what_cannot_be_scored() -> None:
    with pytest.raises(ShapeError, match="hits of 1 queries were given, and relevant entries of 2"):
        retrieval_scores([["a"]], [["a"], ["b"]])
    with pytest.raises(ConfigError, match="the hits of query 1 contain an entry twice"):
        retrieval_scores([["a"], ["a", "b", "a"]], [["a"], ["b"]])
    with pytest.raises(ConfigError, match="a metric of ir_measures is spelled R@10"):
        retrieval_scores([["a"]], [["a"]], ["recall at ten"])


def features(rows: int, width: int, seed: int) -> torch.Tensor:
    mixed = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) @ mixed


@pytest.mark.parametrize("width", [1, 2, 13])
def test_the_formula(width: int) -> None:
    """‖μ₁ − μ₂‖² + tr(C₁ + C₂ − 2 (C₁C₂)^½), the root through that of C₁, which is symmetric."""
    real, made = features(101, width, 0), features(53, width, 5) + 0.7
    own, other = torch.cov(real.T).reshape(width, width), torch.cov(made.T).reshape(width, width)
    values, vectors = torch.linalg.eigh(own)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    crossed = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()
    wanted = (real.mean(0) - made.mean(0)).square().sum() + own.trace() + other.trace() - 2 * crossed
    assert frechet_distance(real, made) == pytest.approx(float(wanted), rel=1e-8)


def test_it_is_the_same_both_ways_and_nothing_to_itself() -> None:
    real, made = features(29, 3, 0).float(), features(31, 3, 7).float()
    assert frechet_distance(real, made) == pytest.approx(frechet_distance(made, real), rel=1e-9)
    assert abs(frechet_distance(real, real)) < 1e-9 < frechet_distance(real, made)


def test_what_has_no_distance() -> None:
    for real, made in ((torch.zeros(5, 3), torch.zeros(5, 4)), (torch.zeros(1, 3), torch.zeros(5, 3))):
        with pytest.raises(ShapeError, match="of at least two images, of one width"):
            frechet_distance(real, made)
    with pytest.raises(ShapeError, match=r"got generated \(5, 3, 2\)"):
        frechet_distance(torch.zeros(5, 3), torch.zeros(5, 3, 2))
    with pytest.raises(NonFiniteError, match="features of generated images have NaN"):
        frechet_distance(torch.zeros(5, 3), torch.full((5, 3), float("nan")))
