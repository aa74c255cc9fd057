"""How good a ranking of entries is: recall, nDCG, reciprocal rank and their kin, by ir_measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmattn.errors import ConfigError, ShapeError, import_extra

METRICS = ("R@10", "nDCG@10", "RR@10")


def retrieval_scores(
    found: Any, relevant: Sequence[Any], metrics: Sequence[str] = METRICS, *, each: bool = False
) -> dict[str, Any]:
    """Scores of what was found for each of b queries, means over the queries.

    Args:
        found: `Hits` with ids, or for each query the ids that were found, best first; None is no entry.
        relevant: for each query the ids that it should find, or a mapping from them to grades, whole numbers from 0.
        metrics: names of `ir_measures`: "R@10" (recall), "nDCG@10", "RR@10" (the mean of which is MRR), "AP", "P@5",
            "Success@1", …
        each: the scores of each query instead of their mean.

    Returns:
        The scores, by metric.

    Raises:
        ShapeError: another number of queries than of relevant entries.
        ConfigError: a metric that is not known, or an entry that was found twice for a query.
        MissingExtraError: ir_measures is not installed.

    >>> retrieval_scores([["a", "b"], ["c", "d"]], [["b"], ["x"]], ["R@2", "RR"])
    {'R@2': 0.5, 'RR': 0.25}
    """
    rows = [[one for one in line if one is not None] for line in getattr(found, "ids", found)]
    if len(rows) != len(relevant):
        raise ShapeError(f"hits of {len(rows)} queries were given, and relevant entries of {len(relevant)}")
    for number, line in enumerate(rows):
        if len(set(map(str, line))) < len(line):
            raise ConfigError(f"for query {number} an entry was found twice: {line[:10]}")
    library = import_extra("ir_measures", "metrics")
    try:
        measures = {name: library.parse_measure(name) for name in metrics}
    except (ValueError, NameError, SyntaxError) as error:
        raise ConfigError(f"a metric of ir_measures is spelled R@10, nDCG@10, RR@10, AP, …; got {metrics}") from error
    # The best has the highest score: ties would be broken by the names of entries.
    run = {
        str(number): {str(one): float(len(line) - place) for place, one in enumerate(line)}
        for number, line in enumerate(rows)
    }
    wanted = {str(number): _grades(one) for number, one in enumerate(relevant)}
    scores: dict[str, list[float]] = {name: [0.0] * len(rows) for name in metrics}
    names = {str(measure): name for name, measure in measures.items()}
    for metric in library.iter_calc(list(measures.values()), wanted, run):
        scores[names[str(metric.measure)]][int(metric.query_id)] = float(metric.value)
    if each:
        return scores
    return {name: sum(values) / len(values) if values else 0.0 for name, values in scores.items()}


def _grades(relevant: Any) -> dict[str, int]:
    if isinstance(relevant, Mapping):
        return {str(one): int(grade) for one, grade in relevant.items()}
    return {str(one): 1 for one in relevant}
