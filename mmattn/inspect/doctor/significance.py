"""Exact tests and intervals of counts: binomial, McNemar, Fisher, Holm."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

#: Error level of all tests together.
LEVEL = 0.01


def binomial_tail(count: int, total: int, share: float) -> float:
    """Return the probability of `count` or more of `total`, each with the probability `share`.

    >>> round(binomial_tail(2, 2, 0.5), 6)
    0.25
    """
    if count <= 0 or share in (0.0, 1.0):
        return float(count <= total * share)
    ways, log = math.lgamma, (math.log(share), math.log1p(-share))
    terms = ((ways(total + 1) - ways(k + 1) - ways(total - k + 1), k) for k in range(count, total + 1))
    return math.fsum(math.exp(comb + k * log[0] + (total - k) * log[1]) for comb, k in terms)


def interval(count: int, total: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share, in steps of 0.1 % (Clopper and Pearson 1934).

    >>> interval(0, 10)
    (0.0, 0.309)
    """
    steps = [step / 1000 for step in range(1001)]
    above = bisect_right(steps, 0.025, key=lambda one: binomial_tail(count, total, one))
    high = bisect_left(steps, 0.975, key=lambda one: binomial_tail(count + 1, total, one))
    return steps[max(above - 1, 0)], steps[min(high, 1000)]


def mcnemar(better: Sequence[bool], worse: Sequence[bool]) -> float:
    """Return the one-sided p-value of the first of each pair being right more often (McNemar 1947).

    >>> round(mcnemar([True] * 5, [False] * 4 + [True]), 6)
    0.0625
    """
    gains, losses = (sum(x > y for x, y in zip(a, b, strict=True)) for a, b in ((better, worse), (worse, better)))
    return binomial_tail(gains, gains + losses, 0.5)


def fisher(better: Sequence[bool], worse: Sequence[bool]) -> float:
    """Return the one-sided p-value of the first group being right more often (Fisher 1922).

    >>> fisher([True] * 3, [False] * 3)
    0.05
    """
    n, m, right = len(better), len(worse), sum(better) + sum(worse)
    ways = (math.comb(n, k) * math.comb(m, right - k) for k in range(sum(better), min(n, right) + 1))
    return sum(ways) / math.comb(n + m, right)


def rejected(p_values: Mapping[str, float]) -> set[str]:
    """Return the names of tests that are rejected at the level of all together (Holm 1979).

    >>> rejected({"a": 0.004, "b": 0.2})
    {'a'}
    """
    order = sorted(p_values, key=p_values.__getitem__)
    accepted = [place for place, name in enumerate(order) if p_values[name] > LEVEL / (len(order) - place)]
    return set(order[: accepted[0]] if accepted else order)
