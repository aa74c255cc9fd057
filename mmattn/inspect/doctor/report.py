"""`Report`: the verdicts of the doctor, figures and answers of a model that was asked; exact tests of these figures."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from mmattn.inspect.doctor.questions import Item, contents
from mmattn.inspect.explorer import data_url
from mmattn.inspect.trace import small_jpeg

_WORDS = {True: "ok", False: "FAIL", None: "note"}
#: Names of the two kinds of evidence that the text of a report compares.
RIGHT, DIFFERENT = "right evidence", "different evidence"
#: Items that the text shows.
_SHOWN = 5


@dataclass
class Report:
    """Verdicts of checks, in their order; of a model that answers questions also figures and every answer.

    Args:
        lines: verdict (None for a note), name of the check and its result.
        title: questions, answers and seconds, in a line.
        figures: which answers are right, by the kind of evidence.
        follows: for each item, if its answer follows the evidence: right, and from different evidence what follows
            there.
        items: the questions.
        answers: to each item, by the kind of evidence.

    >>> report = Report()
    >>> report.add(True, "rows", "each depends on its own memory only")
    >>> report.add(None, "null slot", "there is none")
    >>> print(report)
    ok    rows       each depends on its own memory only
    note  null slot  there is none
    >>> assert report.ok, report
    """

    lines: list[tuple[bool | None, str, str]] = field(default_factory=list)
    title: str = ""
    figures: dict[str, list[bool]] = field(default_factory=dict)
    follows: list[bool] = field(default_factory=list)
    items: Sequence[Item] = ()
    answers: dict[str, list[str]] = field(default_factory=dict)

    def add(self, ok: bool | None, check: str, result: str) -> None:
        """Append a line."""
        self.lines.append((ok, check, result))

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check for ok, check, _ in self.lines if ok is False]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        figures = {
            name: {"right": sum(right), "of": len(right), "interval": interval(sum(right), len(right))}
            for name, right in self.figures.items()
        }
        checks = [{"verdict": _WORDS[ok], "check": check, "answer": result} for ok, check, result in self.lines]
        items = [
            {"row": item.row, "question": item.question, "answer": item.answer, "follows": follows}
            | {"different_answer": item.different_answer}
            | {"answers": {name: texts[place] for name, texts in self.answers.items()}}
            for place, (item, follows) in enumerate(zip(self.items, self.follows, strict=True))
        ]
        return {"ok": self.ok, "title": self.title, "figures": figures, "checks": checks, "items": items}

    def __str__(self) -> str:
        width = max((len(check) for _, check, _ in self.lines), default=0)
        verdicts = "\n".join(f"{_WORDS[ok]:<4}  {check:<{width}}  {result}" for ok, check, result in self.lines)
        if not self.items:
            return verdicts
        values, lines = self.as_dict(), [self.title, "", f"{'right answers':<22}            95 % interval"]
        for name, figure in values["figures"].items():
            low, high = figure["interval"]
            share = f"{figure['right']:>3}/{figure['of']:<3} {figure['right'] / figure['of']:>4.0%}"
            lines.append(f"{name:<22} {share}  {low:.0%}–{high:.0%}")
        stuck = [item for item in values["items"] if not item["follows"]]
        lines += ["", verdicts, "", f"{len(stuck)} of {len(self.items)} answers do not follow the evidence"]
        for item in stuck[:_SHOWN]:
            answer, other = (item["answers"][name].strip()[:40] for name in (RIGHT, DIFFERENT))
            question = f"row {item['row']}: {item['question']} {item['answer']!r}"
            lines.append(f"  {question}: answers {answer!r}, from {DIFFERENT} {other!r}")
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return a page in the style of `mmattn explore`: the text of the report, and all questions and answers."""
        style = (Path(__file__).resolve().parents[1] / "explorer.css").read_text(encoding="utf-8")
        rows = [["evidence", "row", "follows", "question", "answer", *self.answers]] if self.items else []
        for item, values in zip(self.items, self.as_dict()["items"], strict=True):
            evidence: list[Any] = contents(item.parts)
            shown = [escape(p) if isinstance(p, str) else f'<img src="{data_url(small_jpeg(p))}">' for p in evidence]
            cells = [item.row, values["follows"], item.question, item.answer, *values["answers"].values()]
            rows.append(["<br>".join(shown), *(escape(str(cell)) for cell in cells)])
        table = "".join(f"<tr><td>{'<td>'.join(row)}" for row in rows)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>doctor</title><style>{style}</style>'
            f'<section><h1>mmattn doctor</h1><pre style="white-space: pre-wrap">{escape(str(self))}</pre>'
            f'<div style="overflow-x: auto"><table>{table}</table></div></section></html>'
        )


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
    above = bisect_right(steps, 0.025, key=lambda share: binomial_tail(count, total, share))
    high = bisect_left(steps, 0.975, key=lambda share: binomial_tail(count + 1, total, share))
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
