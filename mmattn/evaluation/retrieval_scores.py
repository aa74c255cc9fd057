"""Scores of rankings: recall, nDCG, reciprocal rank and others, by ir_measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmattn.errors import ConfigError, ShapeError, import_extra

METRICS = ("R@10", "nDCG@10", "RR@10")


def retrieval_scores(hits: Any, relevant: Sequence[Any], metrics: Sequence[str] = METRICS) -> dict[str, float]:
    """Return the scores of the hits of b queries by metric, as means over the queries.

    Args:
        hits: `Hits` with ids, or for each query the retrieved ids, best first; None is no entry.
        relevant: for each query the relevant ids, or a mapping from them to grades, whole numbers from 0.
        metrics: names of `ir_measures`: "R@10" (recall), "nDCG@10", "RR@10" (its mean is MRR), "AP", "P@5",
            "Success@1", …

    Raises:
        ShapeError: another number of queries than of relevant entries.
        ConfigError: an unknown metric, or an entry twice in the hits of a query.
        MissingExtraError: ir_measures is not installed.

    >>> retrieval_scores([["a", "b"], ["c", "d"]], [["b"], ["x"]], ["R@2", "RR"])
    {'R@2': 0.5, 'RR': 0.25}
    """
    rows = [[one for one in line if one is not None] for line in getattr(hits, "ids", hits)]
    if len(rows) != len(relevant):
        raise ShapeError(f"hits of {len(rows)} queries were given, and relevant entries of {len(relevant)}")
    for number, line in enumerate(rows):
        if len(set(map(str, line))) < len(line):
            raise ConfigError(f"the hits of query {number} contain an entry twice: {line[:10]}")
    scores = _calculate(rows, relevant, metrics)
    return {name: sum(values) / len(values) if values else 0.0 for name, values in scores.items()}


def _calculate(rows: list[list[Any]], relevant: Sequence[Any], metrics: Sequence[str]) -> dict[str, list[float]]:
    library = import_extra("ir_measures", "metrics")
    try:
        names = {str(library.parse_measure(name)): name for name in metrics}
    except (ValueError, NameError, SyntaxError) as error:
        raise ConfigError(f"a metric of ir_measures is spelled R@10, nDCG@10, RR@10, AP, …; got {metrics}") from error
    # Scores fall with the rank: ties would be broken by the ids.
    run = {
        str(number): {str(one): float(len(line) - place) for place, one in enumerate(line)}
        for number, line in enumerate(rows)
    }
    grades = {str(number): _grades(one) for number, one in enumerate(relevant)}
    scores = {name: [0.0] * len(rows) for name in metrics}
    for metric in library.iter_calc([library.parse_measure(name) for name in metrics], grades, run):
        scores[names[str(metric.measure)]][int(metric.query_id)] = float(metric.value)
    return scores


def _grades(relevant: Any) -> dict[str, int]:
    if isinstance(relevant, Mapping):
        return {str(one): int(grade) for one, grade in relevant.items()}
    return {str(one): 1 for one in relevant}
