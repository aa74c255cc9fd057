"""Scores of rankings, beside the formulas."""

from __future__ import annotations

import math

import pytest
import torch

import mmattn
from mmattn.errors import ConfigError, ShapeError
from mmattn.evaluation import retrieval_scores


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
